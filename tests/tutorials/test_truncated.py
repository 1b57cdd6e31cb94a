"""The tutorials on truncated posteriors, at a size for tests."""

import importlib.util
from pathlib import Path

import matplotlib.image
import pytest
import torch


def load(name):
    path = Path(__file__).parents[2] / "tutorials" / "truncated" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def test_bars_are_found(tmp_path):
    output = tmp_path / "bars.png"
    assert load("bars").main(["--seeds", "1", "--epochs", "25", "--output", str(output)]) == 1
    assert output.exists()


@pytest.mark.parametrize("options", [[], ["--missing", "0.3"], ["--linear"]])
def test_an_image_is_denoised(tmp_path, options):
    denoising = load("denoising")
    # Stripes and a square: what patches of a real image have in common, without the image.
    image = torch.zeros(32, 32)
    image[:, ::4] = 200.0
    image[8:20, 8:20] = 120.0
    path = tmp_path / "image.png"
    matplotlib.image.imsave(path, image.numpy(), cmap="gray", vmin=0, vmax=255)
    options = [*options, "--image", str(path), "--side", "5", "--latents", "12"]
    options += ["--out", str(tmp_path)]
    found = denoising.main([*options, "--states", "16", "--epochs", "25", "--batch-size", "50"])
    assert (tmp_path / "denoising.csv").read_text().count("\n") == 7
    noise_alone = 20 * torch.log10(torch.tensor(255.0 / 25)).item()
    assert found > noise_alone + 2
