"""Train a small character model on the guide's text, with monotile's attention forward and backward.

python examples/train_characters.py                       # 300 steps on this machine's processor
python examples/train_characters.py --steps 20 --compile  # torch.compile, in one graph
python examples/train_characters.py --picture curve.svg   # the loss, step by step, as a picture
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import monotile

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
WIDTH, HEADS, KV_HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 2, 2, 128, 16


class Block(nn.Module):
    """Attention with two query heads to a KV head, then two linear layers; each adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        mixed = monotile.attention(q, k, v, causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class CharacterModel(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(steps: int, compiler: str | None = None) -> list[float]:
    """Return the loss of each step, in nats to a character; `compiler` is a backend of torch.compile."""
    torch.manual_seed(0)
    text = "".join(page.read_text() for page in sorted(GUIDE.glob("*.md")))
    alphabet = {c: n for n, c in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[c] for c in text])
    model = CharacterModel(len(alphabet))
    run = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    print(f"{len(text)} characters, {len(alphabet)} of them different: a guess costs {math.log(len(alphabet)):.2f}")
    for step in range(steps):
        starts = torch.randint(len(numbers) - CONTEXT - 1, (BATCH,))
        windows = numbers[starts[:, None] + torch.arange(CONTEXT + 1)]
        predicted = run(windows[:, :-1])
        loss = nn.functional.cross_entropy(predicted.flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return losses


def picture(losses: list[float]) -> str:
    """The losses as an SVG image."""
    width, height, edge = 640, 320, 44
    most = math.ceil(max(losses))

    def place(step: float, loss: float) -> str:
        x = edge + (width - 2 * edge) * step / max(1, len(losses) - 1)
        return f"{x:.1f},{height - edge - (height - 2 * edge) * loss / most:.1f}"

    line = " ".join(place(step, loss) for step, loss in enumerate(losses))
    text = 'font-family="sans-serif" font-size="13" fill="#666"'
    marks = [
        f'<text x="{edge - 8}" y="{place(0, loss).split(",")[1]}" text-anchor="end" {text}>{loss}</text>'
        for loss in range(most + 1)
    ]
    axes = f"{place(0, most)} {place(0, 0)} {place(len(losses) - 1, 0)}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<polyline points="{axes}" fill="none" stroke="#999"/>', *marks,
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle" {text}>step, 0 to {len(losses) - 1}</text>',
        f'<text x="{edge}" y="24" {text}>loss, nats to a character</text>',
        f'<polyline points="{line}" fill="none" stroke="#2a6fdb" stroke-width="1.5"/>', "</svg>", "",
    ])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    found = train(given.steps, "inductor" if given.compile else None)
    if given.picture:
        given.picture.write_text(picture(found))
