"""Plot the results of denoising.py: PSNR over epochs and over CPU time.

    python tutorials/truncated/denoising_curves.py informed=results/a uniform=results/b --out c.png

Each argument is a label and the folder of ``denoising.py --out``.
"""

import argparse
import csv
from pathlib import Path

import matplotlib


def read(folder: Path) -> tuple[list[int], list[float], list[float]]:
    """Return epochs, CPU seconds of training and PSNR in dB, without the noisy image."""
    with (folder / "denoising.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["epoch"])]
    return (
        [int(row["epoch"]) for row in rows],
        [float(row["train_seconds"]) for row in rows],
        [float(row["psnr"]) for row in rows],
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("results/denoising_curves.png"))
    args = parser.parse_args(argv)
    runs = []
    for run in args.runs:
        label, result, folder = run.partition("=")
        if not result:
            parser.error(f"{run!r} is no LABEL=FOLDER, such as informed=results")
        runs.append((label, *read(Path(folder))))
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from pyro_mcvae.evaluation.plots import palette

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis in axes:
        axis.set_prop_cycle(palette())
    for label, epochs, seconds, psnr in runs:
        for axis, xs in zip(axes, (epochs, seconds), strict=True):
            axis.plot(xs, psnr, ms=5, label=label)
    axes[0].set(xlabel="epochs", ylabel="PSNR (dB)")
    axes[1].set(xlabel="CPU seconds of training")
    axes[1].legend(fontsize=8)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
