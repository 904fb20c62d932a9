"""Training a tiny model: AdamW, a learning rate that rises and then falls as a cosine, gradients of a norm of at most 1."""

import math
import time

import torch
import torch.nn.functional as F

# The label of a token that is context, not a target.
IGNORE = -100


def fit(model, learn, steps, lr, warmup=20, groups=None, every=50):
    """`learn(step)` leaves the gradients of a step and answers with its loss in words, printed `every` so many steps.

    Without `groups` of parameters, matrices decay and vectors do not.
    """
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = groups or [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    model.train()
    start = time.time()
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in opt.param_groups:
            group["lr"] = lr * max(scale, 0.01)
        opt.zero_grad(set_to_none=True)
        loss = learn(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % every == 0 or step + 1 == steps:
            print(f"  step {step:4d}  loss {loss}  {time.time() - start:.0f} s", flush=True)
    model.eval()


def next_token_loss(logits, labels):
    """Cross entropy of each token, given those before it."""
    logits = logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORE)
