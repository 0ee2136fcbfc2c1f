"""The 4x4 Sinkhorn normalisation of the hyper-connections, with its gradient, as one Triton kernel each way.

Compiling the unrolled 20 rounds takes minutes; a kernel that keeps a token's 16 numbers in registers takes none. Each division by a
sum s is undone in the backward pass from the stored s: with y = x / (s + eps), dx = (dy - sum(dy * y)) / (s + eps) and x = y (s + eps).
"""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:                                          # CPU only: plain() serves
    triton = None

ROUNDS, EPS = 20, 1e-6


def plain(c):
    """Logits [T,4,4] -> doubly stochastic matrices, in ordinary torch."""
    c = torch.softmax(c, -1) + EPS
    c = c / (c.sum(1, keepdim=True) + EPS)
    for _ in range(ROUNDS - 1):
        c = c / (c.sum(2, keepdim=True) + EPS)
        c = c / (c.sum(1, keepdim=True) + EPS)
    return c


if triton:
    @triton.jit
    def _forward(x, y, soft, sums, T, N: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
        t = tl.program_id(0) * N + tl.arange(0, N)
        i4 = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i4[None, :, None] * 4 + i4[None, None, :]
        ok3 = (t < T)[:, None, None]
        at2 = t[:, None] * 4 + i4[None, :]
        ok2 = (t < T)[:, None]
        c = tl.load(x + at, mask=ok3, other=0.0)
        c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
        c = c / tl.sum(c, axis=2)[:, :, None]
        tl.store(soft + at, c, mask=ok3)
        c = c + E
        s = tl.sum(c, axis=1) + E
        tl.store(sums + at2, s, mask=ok2)
        c = c / s[:, None, :]
        for k in range(R - 1):
            s = tl.sum(c, axis=2) + E
            tl.store(sums + (2 * k + 1) * T * 4 + at2, s, mask=ok2)
            c = c / s[:, :, None]
            s = tl.sum(c, axis=1) + E
            tl.store(sums + (2 * k + 2) * T * 4 + at2, s, mask=ok2)
            c = c / s[:, None, :]
        tl.store(y + at, c, mask=ok3)

    @triton.jit
    def _backward(dy, y, soft, sums, dx, T, N: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
        t = tl.program_id(0) * N + tl.arange(0, N)
        i4 = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i4[None, :, None] * 4 + i4[None, None, :]
        ok3 = (t < T)[:, None, None]
        at2 = t[:, None] * 4 + i4[None, :]
        ok2 = (t < T)[:, None]
        c = tl.load(y + at, mask=ok3, other=0.0)
        d = tl.load(dy + at, mask=ok3, other=0.0)
        for j in range(R - 1):
            k = R - 2 - j
            s = tl.load(sums + (2 * k + 2) * T * 4 + at2, mask=ok2, other=1.0)
            d = (d - tl.sum(d * c, axis=1)[:, None, :]) / s[:, None, :]
            c = c * s[:, None, :]
            s = tl.load(sums + (2 * k + 1) * T * 4 + at2, mask=ok2, other=1.0)
            d = (d - tl.sum(d * c, axis=2)[:, :, None]) / s[:, :, None]
            c = c * s[:, :, None]
        s = tl.load(sums + at2, mask=ok2, other=1.0)
        d = (d - tl.sum(d * c, axis=1)[:, None, :]) / s[:, None, :]
        p = tl.load(soft + at, mask=ok3, other=0.0)
        d = p * (d - tl.sum(d * p, axis=2)[:, :, None])
        tl.store(dx + at, d, mask=ok3)


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        T = x.shape[0]
        y, soft = torch.empty_like(x), torch.empty_like(x)
        sums = torch.empty(2 * ROUNDS - 1, T, 4, device=x.device)
        _forward[(triton.cdiv(T, 32),)](x, y, soft, sums, T, 32, ROUNDS, EPS, num_warps=1)
        ctx.save_for_backward(y, soft, sums)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, soft, sums = ctx.saved_tensors
        dx = torch.empty_like(y)
        T = y.shape[0]
        _backward[(triton.cdiv(T, 32),)](dy.contiguous(), y, soft, sums, dx, T, 32, ROUNDS, EPS, num_warps=1)
        return dx


def sinkhorn(c):
    return Sinkhorn.apply(c) if c.is_cuda else plain(c)


def check(device="cuda"):
    """Largest difference to plain() of values and gradients."""
    torch.manual_seed(0)
    a = (2 * torch.randn(1000, 4, 4, device=device) + 3 * torch.eye(4, device=device)).requires_grad_()
    b = a.detach().clone().requires_grad_()
    g = torch.randn(1000, 4, 4, device=device)
    u, v = Sinkhorn.apply(a), plain(b)
    u.backward(g)
    v.backward(g)
    return float((u - v).abs().max()), float((a.grad - b.grad).abs().max() / b.grad.abs().max())


if __name__ == "__main__":                                   # TRITON_INTERPRET=1 runs it without a GPU
    print(check("cuda" if torch.cuda.is_available() else "cpu"))
