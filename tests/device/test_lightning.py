"""Lightning on a device that the loss is not made on: the trainer moves the modules."""

import importlib
import warnings

import pyro
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_mcvae import TraceSIS_ELBO
from tests.training.runs import Guide, Model, data

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


@pytest.fixture
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        try:
            return importlib.import_module("lightning.pytorch")
        except ImportError as error:
            pytest.skip(f"needs lightning, of the extra 'clients': {error!r}")


def trainer_on(lightning, device):
    """A trainer of two epochs, on a device that Lightning has not heard of."""

    class Accelerator(lightning.accelerators.Accelerator):
        def setup_device(self, device):
            pass

        def teardown(self):
            pass

        @staticmethod
        def parse_devices(devices):
            return [device]

        @staticmethod
        def get_parallel_devices(devices):
            return [device]

        @staticmethod
        def auto_device_count():
            return 1

        @staticmethod
        def is_available():
            return True

        @staticmethod
        def name():
            return device.type

    strategy = lightning.strategies.SingleDeviceStrategy(device, Accelerator())
    return lightning.Trainer(
        max_epochs=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_lightning_moves_the_modules_and_the_loss_follows(lightning, device):
    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.loss = TraceSIS_ELBO(2)
            self.elbo, self.losses, self.places = self.loss(Model(), Guide()), [], set()

        def training_step(self, batch, index):
            torch.manual_seed(len(self.losses))
            loss = self.elbo(*batch)
            self.losses.append(loss.detach().cpu())
            # The trainer takes the modules back to the CPU at its end.
            self.places |= {t.device for t in (*self.parameters(), *self.loss.buffers())}
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    x = data()
    batches = DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=4)
    found = []
    for place in (torch.device("cpu"), device):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        training = Training()
        trainer_on(lightning, place).fit(training, batches)
        assert training.places == {place}
        found.append(torch.stack(training.losses))
    assert len(found[0]) == 2 * len(batches)
    torch.testing.assert_close(found[1], found[0])
