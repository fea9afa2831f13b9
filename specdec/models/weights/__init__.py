"""Checkpoint formats.

Reading safetensors tensor by tensor, and dequantizing AWQ, GPTQ and FP8. Which tensor a layer needs
belongs with the layer in `models.layers`.
"""
