"""Images of digits, or in color, for the comparison of annealed bounds."""

import gzip
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass
class Task:
    """
    Images, one per row, and the kind of their pixels.

    Gray images are binarized in each training step, and once for testing. Color images have values
    in [0, 1].
    """

    name: str
    train: Tensor
    test: Tensor
    channels: int
    size: int
    binary: bool

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        while True:
            for rows in torch.randperm(len(self.train)).split(batch_size):
                x = self.train.index_select(0, rows)
                yield x.bernoulli() if self.binary else x.float() / 255


def load(path: Path | None, limit: int | None, test_images: int) -> Task:
    """
    :param path: None for the digits of scikit-learn; the folder of MNIST; or an ``.npz`` file with
        ``train_images`` and ``test_images``, uint8 of shape ``[images, channels, size, size]``.
    :param limit: the number of training images.
    """
    if path is not None and path.suffix == ".npz":
        return _colour(path, limit, test_images)
    train, test = _digits() if path is None else _mnist(path)
    test = test[:test_images].bernoulli(generator=torch.Generator().manual_seed(0))
    size = round(train.shape[-1] ** 0.5)
    return Task("digits" if path is None else "MNIST", train[:limit], test, 1, size, True)


def _colour(path: Path, limit: int | None, test_images: int) -> Task:
    try:
        with np.load(path) as file:
            images = [torch.from_numpy(file[f"{kind}_images"]) for kind in ("train", "test")]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{path} must contain train_images and test_images: {error}") from error
    channels, size = images[0].shape[1:3]
    train, test = (x.flatten(1) for x in images)
    # Stored as bytes until a step needs them, which takes a quarter of the memory.
    return Task(path.stem, train[:limit], test[:test_images].float() / 255, channels, size, False)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    images = torch.tensor(datasets.load_digits().data, dtype=torch.float) / 16
    # The split does not depend on the seed, so that runs with different seeds are comparable.
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return images[:1500], images[1500:]


def _mnist(root: Path) -> tuple[Tensor, Tensor]:
    """Return gray values in [0, 1], one image per row. torchvision downloads missing files."""
    result = []
    for kind in ("train", "t10k"):
        path = root / "MNIST" / "raw" / f"{kind}-images-idx3-ubyte.gz"
        if not path.exists():
            from torchvision.datasets import MNIST

            MNIST(root, download=True)
        with gzip.open(path) as file:
            pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=16)
        result.append(pixels.view(-1, 784).float() / 255)
    return result[0], result[1]
