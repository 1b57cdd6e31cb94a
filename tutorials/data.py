"""The data sets of the experiments: MNIST, CIFAR-10, CelebA, Frey faces, and scikit-learn's digits.

Files are read from ``--data-root`` in the layout of ``torchvision.datasets``. ``--download``
downloads missing files with torchvision. The files of MNIST are also read without torchvision.
"""

from __future__ import annotations

import argparse
import gzip
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["add_data_flags", "add_device_flag", "color", "digits", "frey", "mnist"]


def add_data_flags(parser: argparse.ArgumentParser, default: str | None = "data") -> None:
    """Add the flags ``--data-root`` and ``--download``."""
    text = "folder of the data sets, in the layout of torchvision"
    path = None if default is None else Path(default)
    parser.add_argument("--data-root", type=Path, default=path, metavar="DIR", help=text)
    text = "download missing data with torchvision"
    parser.add_argument("--download", action="store_true", help=text)


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--device``."""
    text = "of the networks and the data: cpu, cuda, cuda:1, ..."
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help=text)


def mnist(root: Path, train: bool, download: bool = False) -> tuple[Tensor, Tensor]:
    """
    Return the images of MNIST and their labels, from ``root/MNIST/raw``.

    :returns: gray values in [0, 1], shape ``[N, 784]``, and digits, shape ``[N]``.
    :raises SystemExit: if a file is missing and ``download`` is False.
    """
    stem = Path(root) / "MNIST" / "raw" / ("train" if train else "t10k")
    names = {f"{stem}-images-idx3-ubyte": 16, f"{stem}-labels-idx1-ubyte": 8}
    missing = [n for n in names if not (Path(n).exists() or Path(f"{n}.gz").exists())]
    if missing:
        name = Path(f"{missing[0]}.gz").relative_to(root)
        _download("MNIST", root, download, str(name))
    images, labels = (_idx(name, offset) for name, offset in names.items())
    return images.reshape(-1, 784).float() / 255, labels.long()


def _idx(name: str, offset: int) -> Tensor:
    """Return the bytes after the header of a file, which may be compressed."""
    path = Path(name)
    text = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{name}.gz").read_bytes())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8, offset=offset)


def color(name: str, root: Path, download: bool = False, size: int = 64) -> tuple[Tensor, Tensor]:
    """
    Return the training and test images of a set of color images.

    :param name: ``cifar10``; ``celeba``, whose images are cropped to their center and resized; or
        the name of an ``.npz`` file in ``root`` with ``train_images`` and ``test_images``, bytes of
        shape ``[N, channels, size, size]``.
    :param int size: height and width of the images of CelebA.
    :returns: bytes, shape ``[N, channels, size, size]``.
    :raises SystemExit: if a file is missing and ``download`` is False.
    """
    if name == "cifar10":
        if not (Path(root) / "cifar-10-batches-py").exists():
            _download("CIFAR10", root, download, "cifar-10-batches-py")
        from torchvision.datasets import CIFAR10

        train, test = (torch.from_numpy(CIFAR10(root, train=t).data) for t in (True, False))
        return train.permute(0, 3, 1, 2).contiguous(), test.permute(0, 3, 1, 2).contiguous()
    if name == "celeba":
        if not (Path(root) / "celeba" / "img_align_celeba").exists():
            _download("CelebA", root, download, "celeba/img_align_celeba")
        from torchvision import transforms
        from torchvision.datasets import CelebA

        steps = [transforms.CenterCrop(148), transforms.Resize(size), transforms.PILToTensor()]
        train, test = (
            torch.stack([x for x, _ in CelebA(root, split, transform=transforms.Compose(steps))])
            for split in ("train", "test")
        )
        return train, test
    path = Path(root) / name
    try:
        with np.load(path) as file:
            train, test = (torch.from_numpy(file[f"{k}_images"]) for k in ("train", "test"))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{path} must contain train_images and test_images: {error}") from error
    return train, test


def frey(root: Path) -> Tensor:
    """Return the 1,965 Frey faces from ``root/frey/frey_rawface.mat``, shape ``[1965, 560]``."""
    from scipy.io import loadmat

    path = Path(root) / "frey" / "frey_rawface.mat"
    if not path.exists():
        raise SystemExit(f"the Frey faces are not at {path}: put frey_rawface.mat there")
    return torch.tensor(loadmat(path)["ff"].T).float() / 255


def digits() -> Tensor:
    """Return scikit-learn's 1,797 digits of 8x8 pixels, in an order that no seed changes."""
    from sklearn import datasets

    images = torch.tensor(datasets.load_digits().data, dtype=torch.float) / 16
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]


def _download(name: str, root: Path, download: bool, missing: str) -> None:
    """Download a data set of torchvision, or raise an error that names the missing file."""
    if not download:
        raise SystemExit(
            f"{name} is not at {Path(root) / missing}: pass --data-root with its folder, or "
            f"--download to download it there with torchvision"
        )
    try:
        from torchvision import datasets
    except ImportError as error:
        raise SystemExit("--download needs torchvision: pip install torchvision") from error
    getattr(datasets, name)(root, download=True)
