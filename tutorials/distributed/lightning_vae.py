"""Train any objective of this package in a Lightning module, on one or several processes.

pip install lightning
python tutorials/distributed/lightning_vae.py --devices 2 --accelerator cpu
"""

import argparse

import lightning
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_mcvae import RankBatches, TraceSIS_ELBO


class VAE(nn.Module):
    """A model and guide of binary images. The data plate gets the indices of the minibatch."""

    def __init__(self, num_data: int, pixels: int = 64, latent: int = 8, hidden: int = 100) -> None:
        super().__init__()
        self.num_data, self.latent = num_data, latent
        self.encoder = nn.Sequential(
            nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, pixels)
        )

    def model(self, x: Tensor, index: Tensor) -> None:
        with pyro.plate("data", self.num_data, subsample=index):
            prior = dist.Normal(x.new_zeros(self.latent), x.new_ones(self.latent))
            z = pyro.sample("z", prior.to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor, index: Tensor) -> None:
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", self.num_data, subsample=index):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


class Training(lightning.LightningModule):
    """A module whose attributes are the networks and the objective with its parameters."""

    def __init__(self, vae: VAE, objective: nn.Module, data: Tensor, batch_size: int) -> None:
        super().__init__()
        self.vae, self.objective = vae, objective
        self.batch_size = batch_size
        self.register_buffer("data", data, persistent=False)

    def training_step(self, index: Tensor, step: int) -> Tensor:
        vae = self.vae
        loss = self.objective.differentiable_loss(vae.model, vae.guide, self.data[index], index)
        # Per datum, and the mean over the ranks.
        self.log("loss", loss.detach() / vae.num_data, sync_dist=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> RankBatches:
        # Ranks have disjoint indices, so Lightning must not add a sampler.
        self.batches = RankBatches(self.vae.num_data, self.batch_size)
        return self.batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(devices: int, accelerator: str, epochs: int, num_data: int = 1797) -> lightning.Trainer:
    from sklearn.datasets import load_digits

    lightning.seed_everything(0)
    images = torch.as_tensor(load_digits().images[:num_data])
    data = (images.flatten(1) > 7).to(torch.get_default_dtype())
    training = Training(VAE(len(data)), TraceSIS_ELBO(num_steps=3), data, batch_size=100)
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    # Lightning gives all ranks the same seed. They need different noise.
    torch.manual_seed(trainer.global_rank)
    trainer.fit(training)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    trainer = train(args.devices, args.accelerator, args.epochs)
    if trainer.is_global_zero:
        print(f"loss per image: {float(trainer.callback_metrics['loss']):.2f} nats")


if __name__ == "__main__":
    main()
