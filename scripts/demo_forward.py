"""A batched, differentiable forward pass of the Qwen2.5-VL layout for training a tiny model on a CPU.

Parameters are a flat dict under the names of the Hugging Face checkpoint, so what is trained is what is saved. The
mathematics is that of the published model: window attention with a few full layers in the tower, two-dimensional rotary
positions, a patch merger, and M-RoPE with sections in the text. Only the exponential is our own: MLX's on a CPU takes
about ten times as long as the compiled polynomial here, whose relative error is below 2e-5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

Params = dict[str, mx.array]


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen2.5-VL `config.json` that the forward pass needs."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    eps: float
    theta: float
    sections: tuple[int, ...]
    vision_width: int
    vision_depth: int
    vision_heads: int
    vision_mlp: int
    window: int
    patch: int
    merge: int
    full_layers: tuple[int, ...]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        text, vision = config["text_config"], config["vision_config"]
        rope = text["rope_parameters"]
        return Shape(
            text["vocab_size"],
            text["hidden_size"],
            text["num_hidden_layers"],
            text["num_attention_heads"],
            text["num_key_value_heads"],
            text["intermediate_size"],
            text["rms_norm_eps"],
            rope["rope_theta"],
            tuple(rope["mrope_section"]),
            vision["hidden_size"],
            vision["depth"],
            vision["num_heads"],
            vision["intermediate_size"],
            vision["window_size"],
            vision["patch_size"],
            vision["spatial_merge_size"],
            tuple(vision["fullatt_block_indexes"]),
        )


# ---------------------------------------------------------------------------------------------- fast elementwise parts


def _exp(x: mx.array) -> mx.array:
    """exp by (Taylor polynomial of x / 128) ** 128, not below exp(-60)."""
    t = mx.maximum(x, -60.0) * (1 / 128)
    p = 1 + t * (1 + t * (1 / 2 + t * (1 / 6 + t * (1 / 24 + t * (1 / 120)))))
    for _ in range(7):
        p = p * p
    return p


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * up / (1 + _exp(-gate))


def _swiglu_back(gate: mx.array, up: mx.array, ct: mx.array) -> tuple[mx.array, mx.array]:
    s = 1 / (1 + _exp(-gate))
    return ct * up * s * (1 + gate * (1 - s)), ct * gate * s


def _normal_cdf(x: mx.array) -> mx.array:
    """Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    z = mx.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * _exp(-z * z)
    return mx.where(x < 0, tail, 1 - tail)


# masked scores become exactly 0: products with denormal numbers would be very slow
_exp_fast = mx.compile(lambda x: mx.maximum(_exp(x) - 1e-25, 0.0))
_swiglu_fast, _swiglu_back_fast = mx.compile(_swiglu), mx.compile(_swiglu_back)
_gelu_fast = mx.compile(lambda x: x * _normal_cdf(x))
_gelu_back_fast = mx.compile(
    lambda x, ct: ct * (_normal_cdf(x) + x * _exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
)


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return _swiglu_fast(gate, up)


@swiglu.vjp
def _swiglu_vjp(primals: Any, ct: mx.array, _out: mx.array) -> Any:
    return _swiglu_back_fast(primals[0], primals[1], ct)


@mx.custom_function
def gelu(x: mx.array) -> mx.array:
    return _gelu_fast(x)


@gelu.vjp
def _gelu_vjp(primals: Any, ct: mx.array, _out: mx.array) -> Any:
    x = primals[0] if isinstance(primals, (tuple, list)) else primals
    return _gelu_back_fast(x, ct)


@mx.custom_function
def softmax(x: mx.array) -> mx.array:
    e = _exp_fast(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@softmax.vjp
def _softmax_vjp(_primals: Any, ct: mx.array, out: mx.array) -> Any:
    product = ct * out
    return product - out * product.sum(-1, keepdims=True)


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Negative log-likelihood per row, through the same exponential."""
    top = mx.stop_gradient(logits.max(-1, keepdims=True))
    shifted = logits - top
    total = _exp_of(shifted).sum(-1)
    return mx.log(total) - mx.take_along_axis(shifted, targets[:, None], -1)[:, 0]


@mx.custom_function
def _exp_of(x: mx.array) -> mx.array:
    return _exp_fast(x)


@_exp_of.vjp
def _exp_of_vjp(_primals: Any, ct: mx.array, out: mx.array) -> Any:
    return ct * out


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """(batch, heads, length, head_dim) in and out; `mask` is added to the scores."""
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    return softmax(scores if mask is None else scores + mask) @ v


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    half = x.shape[-1] // 2
    return x * cos + mx.concatenate([-x[..., half:], x[..., :half]], -1) * sin


# ---------------------------------------------------------------------------------------------- tower


@dataclass(frozen=True)
class Layout:
    """How the patches of one grid are ordered into windows: which rows, which rotation, who sees whom."""

    order: mx.array | None  # cell order of the windows; None when every window is whole (a plain permutation still)
    back: mx.array
    cos: mx.array
    sin: mx.array
    mask: mx.array | None
    num_windows: int


def layout_of(shape: Shape, grid_h: int, grid_w: int) -> Layout:
    """The window order of one (grid_h, grid_w) patch grid; grids that cut windows are handled by a mask."""
    merge, side = shape.merge, shape.window // shape.patch // shape.merge
    rows, columns = grid_h // merge, grid_w // merge
    cell = np.arange(rows * columns).reshape(rows, columns)
    window = np.add.outer(np.arange(rows) // side * -(-columns // side), np.arange(columns) // side).reshape(-1)
    order = np.argsort(window, kind="stable")
    y, x = (cell // columns).reshape(-1), (cell % columns).reshape(-1)
    dy, dx = np.indices((merge, merge)).reshape(2, 1, -1)
    ys, xs = (y[order, None] * merge + dy).reshape(-1), (x[order, None] * merge + dx).reshape(-1)
    head = shape.vision_width // shape.vision_heads
    inverse = 10000.0 ** (-np.arange(0, head // 2, 2) / (head // 2))
    angle = np.concatenate([np.outer(ys, inverse), np.outer(xs, inverse)], -1)
    angle = np.concatenate([angle, angle], -1)
    whole = rows % side == 0 and columns % side == 0
    mask = None
    if not whole:
        member = np.repeat(window[order], merge * merge)
        mask = mx.array(np.where(member[:, None] == member[None], 0.0, -1e9).astype(np.float32))
    return Layout(
        mx.array(order),
        mx.array(np.argsort(order)),
        mx.array(np.cos(angle).astype(np.float32)),
        mx.array(np.sin(angle).astype(np.float32)),
        mask,
        len(set(window.tolist())) if whole else 1,
    )


def tower(params: Params, shape: Shape, patches: mx.array, layout: Layout) -> mx.array:
    """Picture features (frames, cells, width) of patches (frames, grid_h * grid_w, values), one grid for all."""
    frames, count, _ = patches.shape
    heads, width, group = shape.vision_heads, shape.vision_width, shape.merge**2
    kernel = params["visual.patch_embed.proj.weight"].reshape(width, -1)
    h = (patches @ kernel.T).reshape(frames, count // group, group, width)
    h = h[:, layout.order].reshape(frames, count, width)
    for index in range(shape.vision_depth):
        p = f"visual.blocks.{index}."
        x = rms_norm(h, params[p + "norm1.weight"], 1e-6)
        qkv = (x @ params[p + "attn.qkv.weight"].T + params[p + "attn.qkv.bias"]).reshape(frames, count, 3, heads, -1)
        qkv = qkv.transpose(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0], layout.cos, layout.sin), rotate(qkv[1], layout.cos, layout.sin), qkv[2]
        full = index in shape.full_layers
        if full or layout.mask is not None:
            out = attention(q, k, v, None if full else layout.mask)
        else:
            split = (frames, heads, layout.num_windows, -1, width // heads)
            out = attention(q.reshape(split), k.reshape(split), v.reshape(split), None)
            out = out.reshape(frames, heads, count, -1)
        out = out.transpose(0, 2, 1, 3).reshape(frames, count, width)
        h = h + out @ params[p + "attn.proj.weight"].T + params[p + "attn.proj.bias"]
        x = rms_norm(h, params[p + "norm2.weight"], 1e-6)
        gate = x @ params[p + "mlp.gate_proj.weight"].T + params[p + "mlp.gate_proj.bias"]
        up = x @ params[p + "mlp.up_proj.weight"].T + params[p + "mlp.up_proj.bias"]
        h = h + swiglu(gate, up) @ params[p + "mlp.down_proj.weight"].T + params[p + "mlp.down_proj.bias"]
    h = rms_norm(h, params["visual.merger.ln_q.weight"], 1e-6).reshape(frames, count // group, group * width)
    h = gelu(h @ params["visual.merger.mlp.0.weight"].T + params["visual.merger.mlp.0.bias"])
    h = h @ params["visual.merger.mlp.2.weight"].T + params["visual.merger.mlp.2.bias"]
    return h[:, layout.back]


# ---------------------------------------------------------------------------------------------- text


def mrope(shape: Shape, positions: mx.array) -> tuple[mx.array, mx.array]:
    """cos and sin (rows, 1, length, head_dim) of positions (3, rows, length): each section reads its own axis."""
    head = shape.width // shape.heads
    inverse = mx.array((shape.theta ** (-np.arange(0, head, 2) / head)).astype(np.float32))
    axis = np.repeat(np.arange(3), shape.sections)
    angle = positions.astype(mx.float32)[mx.array(axis)].transpose(1, 2, 0) * inverse
    angle = mx.concatenate([angle, angle], -1)[:, None]
    return mx.cos(angle), mx.sin(angle)


def hidden(
    params: Params,
    shape: Shape,
    tokens: mx.array,
    positions: mx.array,
    features: mx.array | None,
    index: mx.array,
    taps: list[mx.array] | None = None,
) -> mx.array:
    """Final normalised states (rows, length, width); `index` >= 0 takes that row of the features instead of a token.

    The states after each layer are appended to `taps` when given.
    """
    table = params["model.embed_tokens.weight"]
    if features is not None:
        tokens = mx.where(index >= 0, index + shape.vocab, tokens)
        table = mx.concatenate([table, features.reshape(-1, shape.width)])
    h = table[tokens]
    rows, length = tokens.shape
    cos, sin = mrope(shape, positions)
    mask = mx.triu(mx.full((length, length), -1e9), 1)
    repeat = shape.heads // shape.kv_heads

    def heads(x: mx.array, count: int) -> mx.array:
        return x.reshape(rows, length, count, -1).transpose(0, 2, 1, 3)

    for layer in range(shape.layers):
        p = f"model.layers.{layer}."
        x = rms_norm(h, params[p + "input_layernorm.weight"], shape.eps)
        q, k, v = (
            heads(x @ params[f"{p}self_attn.{n}_proj.weight"].T + params[f"{p}self_attn.{n}_proj.bias"], count)
            for n, count in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # grouped queries as an extra axis, so that keys and values are broadcast and not copied
        q = q.reshape(rows, shape.kv_heads, repeat, length, -1)
        out = attention(q, k[:, :, None], v[:, :, None], mask).reshape(rows, shape.heads, length, -1)
        h = h + out.transpose(0, 2, 1, 3).reshape(rows, length, -1) @ params[p + "self_attn.o_proj.weight"].T
        x = rms_norm(h, params[p + "post_attention_layernorm.weight"], shape.eps)
        gate, up = x @ params[p + "mlp.gate_proj.weight"].T, x @ params[p + "mlp.up_proj.weight"].T
        h = h + swiglu(gate, up) @ params[p + "mlp.down_proj.weight"].T
        if taps is not None:
            taps.append(h)
    return rms_norm(h, params["model.norm.weight"], shape.eps)


def logits(params: Params, states: mx.array) -> mx.array:
    return states @ params["lm_head.weight"].T
