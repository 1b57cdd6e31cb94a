"""Lightning's loops and Accelerate's around one VAE: the steps that a loop by hand takes."""

import pytest
import torch
from torch.utils.data import DataLoader

from pyro_mcvae import CompiledELBO
from tests.clients.losses import LOSSES as PLAIN
from tests.clients.vae import Guide, Model, images

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
LOSSES = {
    **PLAIN,
    "compiled iwae": lambda: CompiledELBO(PLAIN["iwae"](), backend="eager"),
    "compiled sis": lambda: CompiledELBO(PLAIN["sis"](), backend="eager"),
}
EPOCHS = 4


def made(loss):
    """Everything that is trained, as one module, and minibatches in a fixed order."""
    torch.manual_seed(0)
    return LOSSES[loss]()(Model(), Guide()), DataLoader(images(), batch_size=16)


def adam(module, batch):
    """An objective's own parameters, and a program's, are there after its first call."""
    module(batch).detach()
    return torch.optim.Adam(module.parameters(), lr=0.02)


def seeded(module, x, losses):
    """Loops draw random numbers of their own, between steps."""
    torch.manual_seed(len(losses))
    loss = module(x)
    losses.append(loss.item())
    return loss


def by_hand(loss):
    module, loader = made(loss)
    optimizer = adam(module, next(iter(loader)))
    losses = []
    for _ in range(EPOCHS):
        for x in loader:
            optimizer.zero_grad()
            seeded(module, x, losses).backward()
            optimizer.step()
    return losses


def training_of(lightning, module, batch, automatic):
    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.elbo, self.automatic_optimization, self.losses = module, automatic, []

        def training_step(self, x, index):
            loss = seeded(self.elbo, x, self.losses)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, x, index):
            self.log("validation", self.elbo(x))

        def configure_optimizers(self):
            return adam(self.elbo, batch)

    return Training()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_lightning_takes_the_steps_of_a_loop_by_hand(client, loss, automatic):
    lightning = client("lightning")
    module, loader = made(loss)
    training = training_of(lightning, module, next(iter(loader)), automatic)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(training, loader)
    assert training.losses == pytest.approx(by_hand(loss), rel=1e-6)
    assert sum(training.losses[-4:]) < sum(training.losses[:4])


@pytest.mark.parametrize("loss", LOSSES)
def test_lightning_validates_in_inference_mode(client, loss):
    lightning = client("lightning")
    module, loader = made(loss)
    training = training_of(lightning, module, next(iter(loader)), True)
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    (result,) = lightning.Trainer(**quiet).validate(training, loader, verbose=False)
    assert 3 < result["validation"] / 16 < 6  # 6 log 2 is 4.2


@pytest.mark.parametrize("loss", LOSSES)
def test_accelerate_takes_the_steps_of_a_loop_by_hand(client, loss):
    accelerator = client("accelerate").Accelerator(cpu=True)
    module, loader = made(loss)
    optimizer = adam(module, next(iter(loader)))
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for _ in range(EPOCHS):
        for x in loader:
            optimizer.zero_grad()
            accelerator.backward(seeded(module, x, losses))
            optimizer.step()
    assert losses == pytest.approx(by_hand(loss), rel=1e-6)
