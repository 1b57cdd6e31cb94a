"""The settings of truncated.py in plain PyTorch: what the same algorithm costs without Pyro.

    PYTHONPATH=. python tests/benchmarks/truncated_by_hand.py

The search is the package's, the density is written by hand. The first figure is CPU seconds of an
epoch on one thread, the second those of its passes through the decoder alone.
"""

import math
import time

import torch
from torch.nn.functional import softplus

from pyro_mcvae import UniformFlips
from pyro_mcvae.truncated.search import Parents, choose_parents
from pyro_mcvae.truncated.states import StateSpace, distinct_states, duplicates, keep_best


class ByHand:
    """Bernoulli latents, a decoder and Gaussian noise."""

    def __init__(self, N=500, H=64, S=64, update=(5, 4, 1), batch=32):
        torch.manual_seed(0)
        self.N, self.S, self.update, self.batch = N, S, update, batch
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(H, 64), torch.nn.LeakyReLU(0.01), torch.nn.Linear(64, 64)
        )
        self.logits = torch.nn.Parameter(torch.full((H,), 1 / H).logit())
        self.log_sigma = torch.nn.Parameter(torch.zeros(()))
        parameters = [*self.decoder.parameters(), self.logits, self.log_sigma]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)
        self.space, self.x = StateSpace([2] * H), torch.randn(N, 64)
        drawn = (torch.rand(N, S, H) < 1 / H).to(torch.uint8)
        self.stored = self.space.pack(distinct_states(self.space, drawn, S))

    def log_joint(self, states, x):
        z = states.float()
        prior = (z * self.logits).sum(-1) - softplus(self.logits).sum()
        squares = (x.unsqueeze(1) - self.decoder(z)).square().sum(-1)
        constant = 64 * (self.log_sigma + 0.5 * math.log(2 * math.pi))
        return prior - squares / (2 * (2 * self.log_sigma).exp()) - constant

    @torch.no_grad()
    def search(self, index):
        count, children, generations = self.update
        packed = self.stored[index]
        states, keys = self.space.unpack(packed), self.space.keys(packed)
        joint = self.log_joint(states, self.x[index])
        for _ in range(generations):
            chosen = choose_parents(joint, count)
            at = chosen.unsqueeze(-1).expand(-1, -1, packed.shape[-1])
            chosen = self.space.unpack(packed.gather(1, at))
            parents = Parents(self.space, chosen, (packed), joint, keys)
            new = UniformFlips()(parents, children).flatten(1, 2)
            fresh = self.space.pack(new)
            packed = torch.cat([packed, fresh], 1)
            keys = torch.cat([keys, self.space.keys(fresh)], 1)
            joint = torch.cat([joint, self.log_joint(new, self.x[index])], 1)
            best = keep_best(joint, duplicates(keys), self.S)
            keys, joint = keys.gather(1, best), joint.gather(1, best)
            packed = packed.gather(1, best.unsqueeze(-1).expand(-1, -1, packed.shape[-1]))
        self.stored[index] = packed
        return self.space.unpack(packed), joint

    def step(self, index):
        states, joint = self.search(index)
        self.optimizer.zero_grad()
        free_energy = (joint.softmax(1) * self.log_joint(states, self.x[index])).sum()
        (-free_energy * self.N / len(index)).backward()
        self.optimizer.step()

    def decode(self, index):
        """The least that a step does: its passes through the decoder."""
        count, children, generations = self.update
        z = torch.zeros(len(index), self.S, len(self.space))
        with torch.no_grad():
            self.decoder(z)
            for _ in range(generations):
                self.decoder(torch.zeros(len(index), count * children, len(self.space)))
        self.decoder(z).sum().backward()

    def seconds(self, step, epochs=3):
        start = 0.0
        for epoch in range(epochs + 1):
            if epoch == 1:
                start = time.process_time()
            for index in torch.randperm(self.N).split(self.batch):
                step(index)
        return (time.process_time() - start) / epochs


if __name__ == "__main__":
    torch.set_num_threads(1)
    for settings in (
        {"N": 500, "S": 200, "update": (10, 9, 4)},
        {"N": 2000, "S": 64},
        {"N": 2000, "S": 64, "batch": 512},
    ):
        one = ByHand(**settings)
        least = one.seconds(one.decode)
        print(f"{settings}: {one.seconds(one.step):.3f} s, decoder {least:.3f} s", flush=True)
