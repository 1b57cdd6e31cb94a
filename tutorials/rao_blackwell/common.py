"""Functions that all experiments use: MNIST, results, tables and figures."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results, same_settings

__all__ = ["Results", "draw_curves", "read_mnist", "same_settings", "write_table"]


def read_mnist(root: str, train: bool) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 784]`` in [0, 1] and labels ``[N]`` from ``root/MNIST/raw``."""
    stem = Path(root) / "MNIST" / "raw" / ("train" if train else "t10k")
    with gzip.open(f"{stem}-images-idx3-ubyte.gz") as file:
        images = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
    with gzip.open(f"{stem}-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)
    return images.reshape(-1, 784).float() / 255, labels.long()


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> str:
    """Write and return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text


def draw_curves(path: Path, curves: dict[str, list[float]], xlabel: str, ylabel: str) -> None:
    """Plot a line for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)  # whole epochs only
    axes.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
