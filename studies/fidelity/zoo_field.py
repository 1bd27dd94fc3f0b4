"""The field at its real depth: the best-known models, then the kinds beside them; all are healthy.

Each is trained in bf16 by a published recipe, or has no part that a recipe keeps in fp32.
"""

from __future__ import annotations

from zoo_field_classics import CLASSICS
from zoo_field_kinds import KINDS
from zoo_field_sequences import SEQUENCES

# One of each kind before its relatives, so that a short run on a GPU sees every kind.
FIRST = (
    "resnet50", "mobilenet_v2", "densenet121", "shufflenet_v2", "efficientnet_b0", "vit_b_16", "unet_bn", "ddpm_unet",
    "gpt2_small", "llama_160m", "bert_base", "t5_small", "whisper_tiny", "wav2vec2_base", "clip", "lstm_3",
    "lora_llama", "stylegan2", "dcgan", "gin", "retinanet", "resnet50_gn", "ft_transformer", "table_mlp_bn",
)  # fmt: skip
_ALL = {case.name: case for case in (*CLASSICS, *KINDS, *SEQUENCES)}
FIELD = [*(_ALL.pop(name) for name in FIRST), *_ALL.values()]
