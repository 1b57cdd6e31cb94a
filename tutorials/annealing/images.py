"""Images of digits, or in color, for the comparison of annealed bounds."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
import data


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

    def to(self, device: str) -> "Task":
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(self.train), device=self.train.device)
            for rows in order.split(batch_size):
                x = self.train.index_select(0, rows)
                yield x.bernoulli() if self.binary else x.float() / 255


def load(
    root: Path | None,
    limit: int | None,
    test_images: int,
    name: str = "mnist",
    download: bool = False,
) -> Task:
    """
    :param root: the folder of the data sets; None for the digits of scikit-learn; or an ``.npz``
        file with color images.
    :param limit: the number of training images.
    :param name: ``mnist``, ``cifar10``, ``celeba``, or an ``.npz`` file in the folder.
    """
    if root is not None and root.suffix == ".npz":
        root, name = root.parent, root.name
    if root is not None and name != "mnist":
        train, test = data.color(name, root, download)
        channels, size = train.shape[1:3]
        # Stored as bytes until a step needs them, which takes a quarter of the memory.
        tested = test[:test_images].flatten(1).float() / 255
        return Task(Path(name).stem, train[:limit].flatten(1), tested, channels, size, False)
    if root is None:
        images = data.digits()
        train, test = images[:1500], images[1500:]
    else:
        train, test = (data.mnist(root, train, download)[0] for train in (True, False))
    test = test[:test_images].bernoulli(generator=torch.Generator().manual_seed(0))
    size = round(train.shape[-1] ** 0.5)
    return Task("digits" if root is None else "MNIST", train[:limit], test, 1, size, True)
