"""ModernBERT: rotated positions, windows in two layers of three, gated layers without biases (arXiv 2412.13663)."""

from __future__ import annotations

from export.checkpoint.families import rope
from export.checkpoint.families.family import BERT_SIZES, Family

FAMILY = Family(
    model_type="modernbert",
    stem="ModernBert",
    prefix="model.",
    heads=("head.", "decoder.", "classifier."),
    tied={"decoder.weight": "embeddings.tok_embeddings.weight"},
    word_logits=lambda model, hidden: model.decoder(model.head(hidden)),
    sizes=BERT_SIZES,
    settings=(
        "norm_eps",
        "norm_bias",
        "attention_bias",
        "mlp_bias",
        "decoder_bias",
        "classifier_bias",
        "classifier_pooling",
        "classifier_activation",
        "local_attention",
        "layer_types",
        "rope_parameters",
        "global_attn_every_n_layers",
        "global_rope_theta",
        "local_rope_theta",
    ),
    derived=rope.nested,
    fixed={"quantization_config": None, "sparse_prediction": False},
    activation="hidden_activation",
    epsilon=False,
    segments=False,
    pooling_layer=False,
    embedding={},
    # The fused attention rotates no positions.
    layer={},
    gated=True,
    products=4,
    head_products=1,
)
