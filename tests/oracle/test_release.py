"""Checks of tools/tiny/release.py against torch's number formats, safetensors and transformers.

    python tests/oracle/test_release.py
"""

import os
import tempfile

import numpy as np
import torch

import v4_numpy             # noqa: F401  (puts tools/tiny on the path)
import parity_models
import release
from safetensors import safe_open
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "v4-sim")


def test_formats():
    rng = np.random.default_rng(1)
    middle = (release.E4M3[:126] + release.E4M3[1:127]) / 2         # ties
    x = np.concatenate([rng.standard_normal(100000) * s for s in (1e-3, 1e-2, 1, 30, 300)] + [middle, -middle, [0, -0.0]])
    x = x.astype(np.float32)
    t = torch.tensor(x)
    assert (t.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy() == release.e4m3_encode(x)).all()
    assert (t.bfloat16().view(torch.uint16).numpy() == release.bf16_encode(x)).all()
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), release.E4M3, equal_nan=True)
    assert np.array_equal(codes.view(torch.float8_e8m0fnu).float().numpy(), release.e8m0_decode(codes.numpy()), equal_nan=True)
    nibbles = np.arange(16, dtype=np.uint8)
    assert (release.e2m1_encode(release.e2m1_decode(nibbles)) == nibbles).all()
    ties = release.e2m1_decode(release.e2m1_encode([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -5]))
    assert ties.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -4]
    pairs = rng.integers(0, 16, (8, 64)).astype(np.uint8)
    assert (release.unpack_fp4(release.pack_fp4(pairs)) == pairs).all()
    assert release.pack_fp4(np.array([[1, 2]])).tolist() == [[0x21]]


def test_scales():
    assert release.pow2_scale([448, 449, 6, 1e-4], 448).tolist() == [1, 2, 2.0**-6, 2.0**-22]
    rng = np.random.default_rng(2)
    w = (rng.standard_normal((200, 160)) * 10.0 ** rng.integers(-3, 2, (200, 1))).astype(np.float32)
    for once in (release.round_fp8, release.round_fp4):
        assert (once(once(w)) == once(w)).all()
    assert np.abs(release.round_fp8(w) - w).max() <= np.abs(w).max() / 16


def test_checkpoints():
    for name in ("ckpt-dspark", "ckpt-mtp1"):
        ckpt = release.Checkpoint(os.path.join(GOLDEN, name))
        ckpt.check()
        arrays = {n: ckpt.array(n) for n in ckpt.names()}
        hf = release.release_to_hf(arrays)
        back = release.hf_to_release(hf)
        assert all((back[n] == a).all() for n, a in arrays.items() if not n.startswith("mtp."))
        fields = {k: v for k, v in ckpt.config.items() if k != "quantization_config"}
        with torch.device("meta"):
            want = DeepseekV4ForCausalLM(DeepseekV4Config(**fields)).state_dict()
        assert {n: tuple(t.shape) for n, t in want.items()} == {n: a.shape for n, a in hf.items()}
        with tempfile.TemporaryDirectory() as d:
            release.export(arrays, ckpt.config, d)      # stored values survive another rounding
            again = release.Checkpoint(d)
            again.check()
            assert all((again.array(n) == a).all() for n, a in arrays.items())


def test_files():
    """The reader of the safetensors package agrees."""
    with tempfile.TemporaryDirectory() as d:
        parity_models.write("toy", d)
        ours = release.Checkpoint(d)
        ours.check()
        seen = set()
        for file in sorted(set(ours.index.values())):
            with safe_open(os.path.join(d, file), "pt") as f:
                for name in f.keys():
                    t = f.get_tensor(name).contiguous().view(torch.uint8).numpy().reshape(-1)
                    assert (t == ours.stored(name).data.view(np.uint8).reshape(-1)).all()
                    seen.add(name)
        assert seen == set(ours.index)


if __name__ == "__main__":
    for test in (test_formats, test_scales, test_checkpoints, test_files):
        test()
        print(test.__name__, "passed")
