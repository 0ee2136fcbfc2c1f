"""Number formats of the release as straight-through roundings in torch (spec: E4M3 with 128x128 E8M0 tiles, E2M1 with E8M0
per 32, BF16; A8, A4 and the Hadamard transform on activations)."""
import torch


def pow2(e):
    """2**e for int32 e in -126..127."""
    return ((e + 127) << 23).view(torch.float32)


def pow2_ceil(y):
    """Smallest power of two >= y, by the bits (y > 0, float32)."""
    bits = y.view(torch.int32)
    return (((bits + 0x7fffff) >> 23) << 23).view(torch.float32)


def _round(v, low, mant):
    """Round to `mant` mantissa bits with lowest exponent `low`, ties to even."""
    e = ((v.view(torch.int32) >> 23) & 255) - 127
    ulp = pow2(torch.clamp(e, min=low) - mant)
    return torch.round(v / ulp) * ulp


def e4m3(v):
    return _round(v.clamp(-448.0, 448.0), -6, 3)


def e2m1(v):
    return _round(v.clamp(-6.0, 6.0), 0, 1)


def _ste(x, q):
    return x + (q.to(x.dtype) - x).detach()


def a8(x, group):
    """FP8 round trip over groups of the last axis."""
    v = x.float().unflatten(-1, (-1, group))
    s = pow2_ceil(v.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1.0 / 448.0))
    return _ste(x, (e4m3(v / s) * s).flatten(-2))


def a4(x):
    """FP4 round trip over groups of 32."""
    v = x.float().unflatten(-1, (-1, 32))
    s = pow2_ceil(v.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0 ** -126) * (1.0 / 6.0))
    return _ste(x, (e2m1(v / s) * s).flatten(-2))


def hadamard(n, device=None):
    """Orthonormal Sylvester matrix."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h * n ** -0.5


def fp8_weight(w):
    """The values that FP8 matrices [..., out, in] store; sides are multiples of 128."""
    t = w.float().unflatten(-2, (-1, 128)).unflatten(-1, (-1, 128))
    s = pow2_ceil((t.abs().amax((-3, -1), keepdim=True) * (1.0 / 448.0)).clamp_min(2.0 ** -100))
    return (e4m3(t / s) * s).flatten(-2).flatten(-3, -2)


def fp4_weight(w):
    """The values that FP4 matrices store (last axis grouped by 32)."""
    t = w.float().unflatten(-1, (-1, 32))
    s = pow2_ceil((t.abs().amax(-1, keepdim=True) * (1.0 / 6.0)).clamp_min(2.0 ** -100))
    return (e2m1(t / s) * s).flatten(-2)


class Through(torch.autograd.Function):
    """Forward the rounded value, hand the gradient to the parameter."""

    @staticmethod
    def forward(ctx, p, rounded, dtype):
        return rounded.to(dtype, copy=True)

    @staticmethod
    def backward(ctx, g):
        return g.float(), None, None
