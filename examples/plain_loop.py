"""Train a small GPT in a plain PyTorch loop, without a Trainer.

    torchrun --nproc-per-node 2 examples/plain_loop.py

or by hand, one process per line, on one machine or on two (then with the first one's address):

    python examples/plain_loop.py --rank 0 --world-size 2 --master-addr 127.0.0.1
    python examples/plain_loop.py --rank 1 --world-size 2 --master-addr 127.0.0.1

The lines that matter are the option and ``convert2distributed_model``. The loop itself stays as it was on one machine.
"""

import argparse
import os
import random
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_distopt import BaguaDistributedOption
from lightning_distopt.algorithms import ALGORITHMS
from lightning_distopt.distributed import get_rank, get_world_size, init_process_group

CONTEXT = 64  # bytes per window


class GPT(nn.Module):
    """A GPT that predicts the next byte; 0.83 M parameters with the defaults."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        """Build the model.

        Args:
            width: features per position, a multiple of ``heads``.
            depth: number of layers.
            heads: attention heads per layer.
        """
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte over windows [batch, time + 1]."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        logits = self.layers(x, mask, is_causal=True) @ self.token.weight.T
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> Tensor:
    """Return Python's own help texts as bytes, int64."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    random.Random(0).shuffle(texts)
    # Some topics contain others: each paragraph once, so that training never sees what is held out.
    return torch.tensor(list("\n\n".join(dict.fromkeys("\n\n".join(texts).split("\n\n"))).encode()))


def batches(text: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows [batch, CONTEXT + 1], without end."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows[torch.randint(len(windows), (batch_size,), generator=generator)]


def main() -> None:
    """Train, and print the loss on text that was held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="bytegrad")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per process and step")
    parser.add_argument("--rank", type=int, default=0, help="of this process, when started by hand")
    parser.add_argument("--world-size", type=int, default=1, help="number of processes, when started by hand")
    parser.add_argument("--master-addr", default="127.0.0.1", help="address of rank 0, when started by hand")
    parser.add_argument("--master-port", type=int, default=23456, help="a free port there")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the other processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=args.timeout)
    device_id = int(os.environ.get("LOCAL_RANK", args.rank)) if torch.cuda.is_available() else None

    rank, world_size = args.rank, args.world_size
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has set the ranks, and where they meet
        init_process_group("gloo" if device_id is None else "nccl", timeout=timeout)
        rank, world_size = get_rank(), get_world_size()

    option = BaguaDistributedOption(
        args.algorithm, master_addr=args.master_addr, master_port=args.master_port, timeout=timeout
    )
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = option.convert2distributed_model(model, world_size, rank, device_id, optimizer=optimizer)

    text = read_text()
    train, held_out = text.tensor_split([len(text) * 9 // 10])
    for step, batch in zip(range(1, args.steps + 1), batches(train, args.batch_size, seed=rank), strict=False):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {model.bytes_sent / 1e6:.1f} MB sent", flush=True)
    model.finish()  # now all ranks hold the same weights
    with torch.no_grad():
        loss = model(held_out.unfold(0, CONTEXT + 1, CONTEXT)[:256])
    print(f"rank {rank} of {world_size}: {loss.item():.4f} nats per byte on text that was held out", flush=True)


if __name__ == "__main__":
    main()
