"""A factorisation machine whose embeddings lie on servers: workers pull a batch's rows, and push their gradients.

    shoal run -n 2 examples/factorisation_machine.py

Expected: a loss of about 0.7 at first, and below 0.5 at the end.
"""

import torch
from torch import nn

from shoal import kv

USERS, ITEMS, RANK, BATCH, STEPS = 2000, 1000, 8, 256, 300


def samples(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Users, items and whether they liked them: by a taste that is to be found."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    users = torch.randint(0, USERS, (BATCH,), generator=generator)
    items = torch.randint(0, ITEMS, (BATCH,), generator=generator)
    liked = (users % 4 == items % 4).float()
    return torch.stack([users, USERS + items], 1), liked


def main() -> None:
    """Train with rows that are pulled and pushed."""
    store = kv.create("dist_async")
    torch.manual_seed(0)
    store.init(["factors", "weights"], [torch.randn(USERS + ITEMS, RANK) * 0.3, torch.zeros(USERS + ITEMS, 1)])
    store.init("bias", torch.zeros(1))
    store.set_optimizer("adagrad", lr=0.3)
    for step in range(STEPS):
        fields, liked = samples(store.rank, step)
        rows, place = fields.unique(return_inverse=True)
        factors = store.row_sparse_pull("factors", rows).requires_grad_()
        weights = store.row_sparse_pull("weights", rows).requires_grad_()
        bias = store.pull("bias").requires_grad_()
        pairs = factors[place].prod(1).sum(1)
        score = pairs + weights[place].sum((1, 2)) + bias
        loss = nn.functional.binary_cross_entropy_with_logits(score, liked)
        loss.backward()
        store.row_sparse_push("factors", rows, factors.grad)
        store.row_sparse_push("weights", rows, weights.grad)
        store.push("bias", bias.grad)
        if step % 50 == 0 or step == STEPS - 1:
            print(f"worker {store.rank} step {step}: loss {loss.item():.4f}")
    store.close()


if __name__ == "__main__":
    main()
