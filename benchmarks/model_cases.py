"""The sixteen models of ``benchmarks.models``: of transformers and timm by their configurations, three written here.

Weights are random. Each has a real size, and a small one in which bits are compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CASES", "Case"]

Inputs = dict[str, torch.Tensor]
_library = torch.library.Library("torchvision", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class Case:
    """One model, in a real size and in a small one."""

    # Takes whether it is the small one.
    make: Callable[[bool], nn.Module]
    # Draws the arguments by name, on the CPU, floating ones in float32; takes whether they are small.
    draw: Callable[[bool], Inputs]
    channels_last: bool = False


def language_model(name: str, small: dict[str, Any], **sizes: Any) -> Callable[[bool], nn.Module]:
    """Return what makes a model of transformers: ``name`` is its class, ``sizes`` are its configuration's."""

    def make(is_small: bool) -> nn.Module:
        kind = getattr(import_hub("transformers"), name)
        config = kind.config_class(**{**sizes, **(small if is_small else {})})
        config.use_cache = False
        made: nn.Module = kind(config)
        return made

    return make


def timm_model(name: str, small: dict[str, Any], **sizes: Any) -> Callable[[bool], nn.Module]:
    """Return what makes a model of timm."""

    def make(is_small: bool) -> nn.Module:
        made: nn.Module = import_hub("timm").create_model(
            name, pretrained=False, **{**sizes, **(small if is_small else {})}
        )
        return made

    return make


def import_hub(name: str) -> Any:
    """Import timm or transformers, also beside a torchvision whose operators are another torch's: they are declared."""
    while importlib.util.find_spec("torchvision"):
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            _library.define(f"{missing[1]}(Tensor x) -> Tensor")
        else:
            break
    return importlib.import_module(name)


def tokens(batch: int, length: int, **others: int) -> Callable[[bool], Inputs]:
    """Return what draws token ids; ``others`` are further arguments and their lengths."""

    def draw(is_small: bool) -> Inputs:
        rows = 2 if is_small else batch
        lengths = {"input_ids": length, **others}
        return {
            name: torch.randint(0, 500, (rows, min(size, 24) if is_small else size)) for name, size in lengths.items()
        }

    return draw


def pictures(batch: int, size: int = 224, small: int = 64, channels: int = 3) -> Callable[[bool], Inputs]:
    """Return what draws pictures."""

    def draw(is_small: bool) -> Inputs:
        return {"x": torch.randn((2, channels, small, small) if is_small else (batch, channels, size, size))}

    return draw


def sounds(batch: int) -> Callable[[bool], Inputs]:
    """Return what draws spectra and tokens."""

    def draw(is_small: bool) -> Inputs:
        rows, length, words = (2, 64, 16) if is_small else (batch, 3000, 128)
        ids = torch.randint(0, 500, (rows, words))
        return {"input_features": torch.randn(rows, 80, length), "decoder_input_ids": ids}

    return draw


class UnetBlock(nn.Module):
    """A stage of a diffusion model's UNet: two residual blocks that read a time embedding, attention, a way down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(5))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))
        self.times = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Take pictures (B, C, H, W) and a time embedding (B, C); return (B, C, H / 2, W / 2)."""
        for number, embed in enumerate(self.times):
            h = self.convolutions[2 * number](functional.silu(self.norms[2 * number](x)))
            h = h + embed(functional.silu(time))[:, :, None, None]
            x = x + self.convolutions[2 * number + 1](functional.silu(self.norms[2 * number + 1](h)))
        batch, channels, height, width = x.shape
        rows = self.norms[4](x).flatten(2).transpose(1, 2)
        heads = self.qkv(rows).view(batch, height * width, 3, channels // 32, 32).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        seen = self.project(seen.transpose(1, 2).reshape(batch, height * width, channels))
        down: torch.Tensor = self.down(x + seen.transpose(1, 2).reshape(x.shape))
        return down


def make_unet(is_small: bool) -> nn.Module:
    """Make a UNet block."""
    return UnetBlock(64 if is_small else 320)


def draw_unet(is_small: bool) -> Inputs:
    """Draw latent pictures and the embeddings of their times."""
    batch, channels, size = (2, 64, 8) if is_small else (8, 320, 64)
    return {"x": torch.randn(batch, channels, size, size), "time": torch.randn(batch, channels)}


class Dlrm(nn.Module):
    """Clicks predicted from numbers and categories: embeddings, their products with each other, two MLPs."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        wide = width + pairs.shape[1]
        self.top = nn.Sequential(nn.Linear(wide, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Take numbers (B, 13) and categories (tables, B, bag); return probabilities (B,)."""
        dense = self.bottom(torch.log1p(numbers.abs()))
        sparse = [table(ids) for table, ids in zip(self.tables, words.unbind(), strict=True)]
        every = torch.stack([dense, *sparse], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)[:, self.pairs]
        return torch.sigmoid(self.top(torch.cat([dense, products], dim=1))).squeeze(1)


def make_dlrm(is_small: bool) -> nn.Module:
    """Make a recommender."""
    return Dlrm(4, 100, 16) if is_small else Dlrm(26, 100_000, 64)


def draw_dlrm(is_small: bool) -> Inputs:
    """Draw numbers and bags of categories."""
    batch, tables, rows = (16, 4, 100) if is_small else (8192, 26, 100_000)
    return {"numbers": torch.randn(batch, 13), "words": torch.randint(0, rows, (tables, batch, 4))}


class GraphNetwork(nn.Module):
    """Messages along the edges of a graph, gathered by scatter, with attention of the edges into a node."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(width, 1) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Take nodes (N, width) and edges (2, E), from and to; return nodes."""
        source, target = edges.unbind()
        into = target[:, None].expand(-1, x.shape[1])
        for message, score, update, norm in zip(self.messages, self.scores, self.updates, self.norms, strict=True):
            sent = functional.gelu(message(torch.cat([x[source], x[target]], dim=1)))
            weight = torch.exp(functional.leaky_relu(score(sent), 0.2).clamp(max=8))
            total = x.new_zeros(x.shape[0], 1).index_add(0, target, weight)
            heard = torch.zeros_like(x).scatter_add(0, into, sent * (weight / (total[target] + 1e-6)))
            x = norm(x + functional.silu(update(torch.cat([x, heard], dim=1))))
        return x


def make_graph_network(is_small: bool) -> nn.Module:
    """Make a graph network."""
    return GraphNetwork(32, 2) if is_small else GraphNetwork(128, 4)


def draw_graph(is_small: bool) -> Inputs:
    """Draw a graph of random edges."""
    nodes, edges, width = (50, 200, 32) if is_small else (100_000, 1_000_000, 128)
    return {"x": torch.randn(nodes, width), "edges": torch.randint(0, nodes, (2, edges))}


_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 500,
}  # fmt: skip
_SMALL_LLAMA = {**_SMALL, "num_key_value_heads": 2}
_SMALL_HEADS = {**_SMALL_LLAMA, "head_dim": 16, "sliding_window": 16}
_WHISPER = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "d_model": 512,
}
_SMALL_WHISPER = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_model": 64, "vocab_size": 500, "max_source_positions": 32,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_SMALL_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 500}
CASES: dict[str, Case] = {
    "llama": Case(language_model("LlamaForCausalLM", _SMALL_LLAMA, **_LLAMA), tokens(4, 1024)),
    "qwen3": Case(language_model("Qwen3ForCausalLM", _SMALL_HEADS, **_LLAMA, head_dim=128), tokens(4, 1024)),
    "gemma2": Case(language_model("Gemma2ForCausalLM", _SMALL_HEADS, **_LLAMA, head_dim=128), tokens(4, 1024)),
    "gpt2": Case(
        language_model(
            "GPT2LMHeadModel",
            {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0},
            n_embd=1024,
            n_layer=6,
            n_head=16,
        ),
        tokens(8, 1024),
    ),
    "bert": Case(language_model("BertForMaskedLM", _SMALL, num_hidden_layers=6), tokens(16, 512)),
    "t5": Case(
        language_model("T5ForConditionalGeneration", _SMALL_T5, feed_forward_proj="gated-gelu"),
        tokens(16, 512, decoder_input_ids=128),
    ),
    "whisper": Case(language_model("WhisperForConditionalGeneration", _SMALL_WHISPER, **_WHISPER), sounds(8)),
    "mamba": Case(
        language_model(
            "MambaForCausalLM",
            {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500, "state_size": 8},
            hidden_size=768,
            num_hidden_layers=4,
            vocab_size=32000,
        ),
        tokens(4, 64),
    ),
    "vit": Case(
        timm_model("vit_base_patch16_224", {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4}), pictures(64)
    ),
    "convnext": Case(timm_model("convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)}), pictures(64)),
    "resnet50": Case(timm_model("resnet50", {"layers": (1, 1, 1, 1)}), pictures(64), channels_last=True),
    "efficientnet": Case(timm_model("efficientnet_b0", {"drop_rate": 0.2}), pictures(64), channels_last=True),
    "swin": Case(
        timm_model(
            "swin_tiny_patch4_window7_224",
            {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32},
        ),
        pictures(64, small=56),
    ),
    "unet": Case(make_unet, draw_unet),
    "dlrm": Case(make_dlrm, draw_dlrm),
    "gnn": Case(make_graph_network, draw_graph),
}
