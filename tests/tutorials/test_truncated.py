"""The tutorials on truncated posteriors, at a size for tests."""

import importlib.util
from pathlib import Path

import matplotlib.image
import pyro
import pytest
import torch
from PIL import Image

from pyro_mcvae import EvolutionaryUpdate, TruncatedPosterior


def load(name):
    path = Path(__file__).parents[2] / "tutorials" / "truncated" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_few_states_hold_the_evidence_of_the_bars():
    bars, images = load("bars"), torch.arange(500)
    model = bars.true_model(bars.make_data(500)[0])
    evidence = TruncatedPosterior(model, 256).posterior(images).free_energy
    guide = TruncatedPosterior(model, 64, evolution=EvolutionaryUpdate(3, 2, 1))
    assert (evidence - guide.posterior(images).free_energy).mean() > 10
    # Of 256 states 6 are looked at in a step: thirty steps find the few that matter.
    assert (evidence - guide.fit(images, num_steps=30)).mean() < 0.02


@pytest.mark.slow
def test_bars_are_found():
    pyro.enable_validation(False)
    bars = load("bars")
    model = bars.true_model(bars.make_data(500)[0])
    with torch.no_grad():
        # Between the bars there is no optimum to be caught in.
        model.decoder.weight.add_(0.2 * torch.randn(16, 8))
        model.pi.fill_(0.2)
        model.sigma.fill_(0.15)
    bars.train(model, epochs=22, rate=0.03, cycle=22)
    assert bars.recovered(model)


@pytest.mark.slow
def test_the_best_start_is_kept(tmp_path, capsys):
    bars, output = load("bars"), tmp_path / "bars.png"
    images = bars.make_data(100)[0]
    pyro.set_rng_seed(3)
    model, curves = bars.best_of(images, starts=2, epochs=1)
    pyro.set_rng_seed(3)
    others = [bars.Model(images) for _ in range(2)]
    assert [bars.train(other, 1) for other in others] == curves
    best = others[0 if curves[0][-1] > curves[1][-1] else 1]
    assert torch.equal(model.fields(), best.fields())
    bars.main(["--seeds", "1", "--starts", "1", "--epochs", "1", "--output", str(output)])
    assert output.exists()
    assert "of 1 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_bars_are_found_from_any_start(tmp_path):
    # With a linear decoder most of the four starts of a seed find them.
    argv = ["--seeds", "3", "--linear", "--epochs", "60", "--output", str(tmp_path / "bars.png")]
    assert load("bars").main(argv) == 3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--missing", "0.3"], marks=pytest.mark.slow),
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--linear"], marks=pytest.mark.slow),
        pytest.param(["--gradient-states", "4", "--window", "0.5"], marks=pytest.mark.slow),
    ],
)
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
    result = denoising.main([*options, "--states", "16", "--epochs", "25", "--batch-size", "50"])
    assert (tmp_path / "denoising.csv").read_text().count("\n") == 7
    noise_alone = 20 * torch.log10(torch.tensor(255.0 / 25)).item()
    assert result > noise_alone + 2


def test_patches_are_averaged_by_their_windows():
    denoising = load("denoising")
    zeros_and_ones = torch.tensor([0.0, 1.0])[:, None].expand(2, 9)  # side by side, 3 x 4 pixels
    near = torch.tensor(0.5).exp()  # a pixel from the middle beside the middle's own
    rows = torch.stack([torch.tensor(0.0), 1 / (1 + near), near / (1 + near), torch.tensor(1.0)])
    merged = denoising.merge(zeros_and_ones, (3, 4), 3, 1 / 3)
    assert torch.allclose(merged, rows.expand(3, 4))
    plain = denoising.merge(zeros_and_ones, (3, 4), 3, float("inf"))
    assert torch.equal(plain[1], torch.tensor([0.0, 0.5, 0.5, 1.0]))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "image.png"
    matplotlib.image.imsave(path, torch.rand(12, 12).numpy(), cmap="gray", vmin=0, vmax=1)
    options = ["--image", str(path), "--side", "5", "--latents", "6", "--states", "8"]
    options += ["--epochs", "2", "--every", "1", "--batch-size", "20"]
    whole = load("denoising").main([*options, "--out", str(tmp_path / "whole")])
    options += ["--out", str(tmp_path / "parts")]

    def interrupt(*_):
        raise KeyboardInterrupt

    stopped = load("denoising")
    monkeypatch.setattr(stopped, "draw", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.main(options)
    assert load("denoising").main([*options, "--resume"]) == whole
    texts = [(tmp_path / run / "denoising.csv").read_text() for run in ("whole", "parts")]
    table = [[row.split(",")[:3] for row in text.splitlines()] for text in texts]
    assert table[0] == table[1]
    assert [row[0] for row in table[0]] == ["epoch", "0", "1", "2"]


def test_curves_are_those_of_the_table(tmp_path):
    curves = load("denoising_curves")
    text = "epoch,psnr,free_energy,train_seconds\n0,20.0,,\n1,21.5,-3.0,2.5\n3,24.0,-2.0,7.5\n"
    (tmp_path / "denoising.csv").write_text(text)
    assert curves.read(tmp_path) == ([1, 3], [2.5, 7.5], [21.5, 24.0])
    curves.main([f"informed={tmp_path}", "--out", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").exists()
    with pytest.raises(SystemExit):
        curves.main([str(tmp_path)])


def test_a_linear_decoder_cannot_say_what_two_layers_can():
    pyro.enable_validation(False)
    correlated = load("correlated_bars")
    truth = correlated.true_model(correlated.make_data(10))
    # The pixels of a bar that is put out are missed by one, and no other state explains them
    # better: four of them in one image, at 1/(2 sigma^2) each and but for the priors.
    assert (correlated.ratios(truth) < -100).all()
    with torch.no_grad():
        truth.decoder[0].weight.copy_(torch.eye(8))
    assert correlated.ratios(truth).abs().max() < 0.1


@pytest.mark.slow
def test_correlated_bars_are_learned_near_the_truth():
    pyro.enable_validation(False)
    bars, correlated = load("bars"), load("correlated_bars")
    truth = correlated.true_model(correlated.make_data(300))
    model = bars.Model(truth.images)
    with torch.no_grad():
        for layer, true in zip(model.decoder, truth.decoder, strict=True):
            if hasattr(true, "weight"):
                layer.weight.copy_(true.weight + 0.1 * torch.randn(true.weight.shape))
        model.pi.fill_(0.2)
        model.sigma.fill_(0.15)
    bars.train(model, epochs=20, rate=0.03, cycle=20)
    result, true = (correlated.ratios(m) for m in (model, truth))
    assert ((result / true - 1).abs() < 0.3).all()
    gap = correlated.evidence(truth, model.images) - correlated.evidence(model, model.images)
    assert gap.mean().abs() < 0.5


def test_a_deepened_decoder_has_the_same_outputs():
    natural = load("natural_images")
    linear = natural.mlp(6, 9)
    deep = natural.deepened(linear)
    z = torch.bernoulli(torch.full((20, 6), 0.4))
    assert torch.equal(deep(z), linear(z))
    assert [layer.out_features for layer in deep[::2]] == [6, 6, 9]


def test_whitened_patches_are_uncorrelated_in_their_components():
    natural = load("natural_images")
    steps = torch.randn(60, 60).cumsum(0).cumsum(1)
    patches = natural.whitened(steps.exp(), 500, side=4, kept=0.95)
    values = torch.linalg.eigvalsh(patches.T @ patches / 500)
    kept = values > 0.5
    assert 0 < kept.sum() < 15
    assert torch.allclose(values, kept.float(), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [False, True])
def test_decoders_of_natural_images(tmp_path, scaling):
    path = tmp_path / "image.tiff"
    Image.fromarray(torch.randint(4000, (40, 40)).numpy().astype("uint16")).save(path)
    options = ["--image", str(path), "--paper", "--smoke", "--latents", "12"]
    options += ["--out", str(tmp_path), *["--scaling"] * scaling]
    curves = load("natural_images").main(options)
    if scaling:
        assert list(curves) == ["12 latents"]
        return
    assert list(curves) == ["linear, first", "linear", "deep"]
    assert (tmp_path / "natural_images.png").exists()
    # Two epochs of few patches change little after the common start.
    assert abs(curves["deep"][0] - curves["linear"][0]) < 0.02 * abs(curves["linear"][0])
