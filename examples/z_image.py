"""Z-Image with llamatap as its text encoder: a quantised Qwen3-4B in place of the pipeline's own.

python examples/z_image.py Qwen3-4B.gguf "a lighthouse at dusk"
python examples/z_image.py Qwen3-4B.gguf "a lighthouse at dusk" --pipeline Tongyi-MAI/Z-Image-Turbo

The second line needs diffusers, PyTorch and a GPU that holds the rest of the pipeline.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from numpy.typing import NDArray

import llamatap as lt
from llamatap.presets import load_preset


def encode(path: str, prompt: str, preset: str = "z-image") -> NDArray[Any]:
    """The pipeline's prompt_embeds for a prompt: bfloat16 (n_tokens, n_embd)."""
    with lt.Model(path) as model:
        return load_preset(preset).encode(model, prompt, dtype="bfloat16").array[:, 0]


def draw(prompt_embeds: NDArray[Any], pipeline: str) -> Any:
    """Draw the picture; the pipeline does not load its own text encoder."""
    import torch
    from diffusers import ZImagePipeline

    pipe = ZImagePipeline.from_pretrained(
        pipeline, text_encoder=None, tokenizer=None, torch_dtype=torch.bfloat16
    )
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    # NumPy's bfloat16 is not PyTorch's: pass the bits.
    tensor = torch.from_numpy(prompt_embeds.view("int16").copy()).view(torch.bfloat16).to(pipe.device)
    # One tensor a picture. Turbo models run 8 passes (9 steps) without guidance; for guidance, also give
    # negative_prompt_embeds: encode(path, "").
    return pipe(prompt_embeds=[tensor], num_inference_steps=9, guidance_scale=0.0).images[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--preset", default="z-image")
    parser.add_argument("--pipeline", help="a folder or a name that diffusers knows")
    parser.add_argument("-o", "--output", default="z_image.png")
    given = parser.parse_args()
    try:
        embeds = encode(given.model, given.prompt, given.preset)
    except lt.Error as error:
        sys.exit(str(error))
    print("prompt_embeds", embeds.shape, embeds.dtype)
    if given.pipeline is not None:
        draw(embeds, given.pipeline).save(given.output)
        print(given.output)
