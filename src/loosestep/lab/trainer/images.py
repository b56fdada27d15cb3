"""Images: a folder with a folder of them for every class, or scikit-learn's digits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.tasks import Batch

HELD_OUT = 10  # one image in so many
ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


class Images:
    """Labelled images, and a small convolutional network."""

    unit = "images"
    units_per_sample = 1

    def __init__(self, name: str, pixels: torch.Tensor, labels: torch.Tensor, width: int) -> None:
        self._name, self._pixels, self._labels, self._width = name, pixels, labels, width
        self._num_classes = int(labels.max()) + 1
        if width < 4:
            raise BadInput(f"--width must be at least 4 for images, got {width}")
        if self._num_classes < 2 or len(labels) < 2 * HELD_OUT:
            raise BadInput(
                f"{name}: {len(labels)} images of {self._num_classes} classes; at least "
                f"{2 * HELD_OUT} images of 2 classes are needed"
            )
        mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._held_out, self._training = (
            mixed[::HELD_OUT],
            mixed[torch.arange(len(mixed)) % HELD_OUT > 0],
        )
        self.num_samples, self.num_held_out = len(self._training), len(self._held_out)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Return training images and their classes."""
        return self._of(self._training[numbers])

    def held_out(self, numbers: torch.Tensor) -> Batch:
        """Return images that are never trained on."""
        return self._of(self._held_out[numbers])

    def _of(self, numbers: torch.Tensor) -> Batch:
        return self._pixels[numbers].float().div(127.5).sub(1.0), self._labels[numbers]

    def make_model(self) -> torch.nn.Module:
        """Return a network with batch norms, whose statistics a strategy must average too."""
        return network(self._pixels.shape[1], self._num_classes, self._width)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the nats an image."""
        return torch.nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    def describe(self) -> dict[str, Any]:
        """Return what was read."""
        digest = hashlib.sha256(self._pixels.numpy().tobytes()).hexdigest()
        return {"name": self._name, "bytes": self._pixels.nbytes, "sha256": digest}


def network(channels: int, num_classes: int, width: int) -> torch.nn.Module:
    """Return three convolutions, each with a batch norm, and a linear layer."""
    layers: list[torch.nn.Module] = []
    for stage, wide in enumerate((width // 4, width // 2, width)):
        layers += [
            torch.nn.Conv2d(channels, wide, 3, stride=1 + (stage > 0), padding=1, bias=False),
            torch.nn.BatchNorm2d(wide),
            torch.nn.ReLU(),
        ]
        channels = wide
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, num_classes)]
    return torch.nn.Sequential(*layers, *head)


def read_images(sources: tuple[str, ...], size: int, width: int) -> Images:
    """Read a folder of folders, or the digits if none is given."""
    if not sources:
        return Images("scikit-learn digits", *_digits(), width)
    if len(sources) > 1:
        raise BadInput(f"give one folder with a folder for every class, got {len(sources)}")
    return Images(Path(sources[0]).name, *_folder(Path(sources[0]), size), width)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInput(
            "the digits come with scikit-learn: pip install 'loosestep[images]', or name a folder"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    square = torch.tensor(pixels).view(-1, 1, 8, 8).mul(255 / 16).to(torch.uint8)
    return square, torch.tensor(labels).long()


def _folder(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder")
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    found = [
        (label, path)
        for label, kind in enumerate(classes)
        for path in sorted(kind.iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise BadInput(f"{folder}: no images; it must hold a folder of images for every class")
    pixels = torch.stack([_pixels(path, size) for _, path in found])
    return pixels, torch.tensor([label for label, _ in found])


def _pixels(path: Path, size: int) -> torch.Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("images need pillow: pip install 'loosestep[images]'") from None
    try:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((size, size))
    except Image.DecompressionBombError as error:
        raise BadInput(f"{path}: {str(error).rstrip('.')}; scale it down first") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # as Pillow's readers differ
        raise BadInput(f"{path}: not an image that can be read: {error}") from None
    raw = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return raw.view(size, size, 3).permute(2, 0, 1).contiguous()
