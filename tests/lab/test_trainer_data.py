"""What the trainer learns from, in which order, and the models that learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from loosestep.lab.trainer.images import network, read_images
from loosestep.lab.trainer.loop import held_out_numbers, rate_factor
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.tasks import Feed, Order
from loosestep.lab.trainer.text import Text, is_binary, read_text
from loosestep.lab.trainer.transformer import Shape, Transformer

pytestmark = pytest.mark.fast

SHAPE = Shape(context=8, width=16, depth=2, heads=2)


# Text


def test_files_are_read_in_a_fixed_order_and_binary_ones_of_a_folder_left_out(tmp_path: Path):
    (tmp_path / "b.txt").write_text("b" * 300)
    (tmp_path / "a.txt").write_text("a" * 300 + "\n")
    (tmp_path / "c.bin").write_bytes(bytes(range(256)) * 4)
    (tmp_path / ".hidden").write_text("h" * 300)
    whole = read_text([str(tmp_path)], None, SHAPE)
    assert whole.describe() == read_text([str(tmp_path / "*.txt")], None, SHAPE).describe() | {
        "name": tmp_path.name
    }
    assert whole.describe()["bytes"] == 602  # each file ends in a newline
    order = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]
    assert read_text(order, None, SHAPE).describe()["sha256"] != whole.describe()["sha256"]


def test_a_hidden_folder_that_is_named_is_read(tmp_path: Path):
    (tmp_path / ".books").mkdir()
    (tmp_path / ".books" / "a.txt").write_text("a" * 400)
    assert read_text([str(tmp_path / ".books")], None, SHAPE).describe()["bytes"] == 401


def test_the_default_text_is_the_same_every_time_and_has_a_limit():
    one, other = (read_text((), 40_000, SHAPE).describe() for _ in range(2))
    assert one == other
    assert one["bytes"] == 40_000


def test_training_and_held_out_windows_are_apart_and_together_are_all(tmp_path: Path):
    content = torch.randint(256, (8 * 1000 + 1,), generator=torch.Generator().manual_seed(0))
    text = Text("random", bytes(content.tolist()), SHAPE)
    assert text.num_samples + text.num_held_out == 1000
    assert text.num_held_out == pytest.approx(50, abs=16)  # one in twenty, in runs of 16
    train, train_next = text.batch(torch.arange(text.num_samples))
    held, held_next = text.held_out(torch.arange(text.num_held_out))
    assert torch.equal(train[:, 1:], train_next[:, :-1])
    windows = {tuple(row) for row in content[:-1].view(1000, 8).tolist()}
    seen, unseen = ({tuple(row) for row in part.tolist()} for part in (train, held))
    assert seen | unseen == windows  # 8 random bytes do not come twice
    assert not seen & unseen
    judged = {tuple(row) for row in content[1:].view(1000, 8).tolist()}
    assert {tuple(row) for row in held_next.tolist()} < judged


def test_what_is_binary(tmp_path: Path):
    file = tmp_path / "x"
    for content, binary in [(b"", False), ("größe\n".encode(), False), (b"a\0b", True)]:
        file.write_bytes(content)
        assert is_binary(file) == binary


# Images


def test_digits_make_a_task():
    task = read_images((), 32, 16)
    pixels, labels = task.batch(torch.arange(100))
    assert pixels.shape == (100, 1, 8, 8)
    assert pixels.min() >= -1
    assert pixels.max() <= 1
    assert set(labels.tolist()) == set(range(10))
    assert task.num_samples + task.num_held_out == 1797


def picture_folder(folder: Path, num_each: int) -> Path:
    for color in ("red", "green"):
        (folder / color).mkdir()
        for number in range(num_each):
            Image.new("RGB", (9 + number, 7), color).save(folder / color / f"{number}.png")
    return folder


def test_a_folder_of_pictures_has_a_class_for_every_folder(tmp_path: Path):
    folder = picture_folder(tmp_path, 12)
    (folder / "red" / "notes.txt").write_text("no picture")
    task = read_images((str(folder),), 6, 16)
    assert task.num_samples + task.num_held_out == 24
    pixels, labels = task.batch(torch.arange(task.num_samples))
    assert pixels.shape[1:] == (3, 6, 6)
    red = pixels[labels == 1][0]  # green is 0, red 1: by name
    assert red[0].eq(1).all()
    assert red[1:].eq(-1).all()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"words"])
def test_a_broken_picture_is_named(tmp_path: Path, content: bytes):
    bad = picture_folder(tmp_path, 12) / "green" / "99.png"
    bad.write_bytes(content)
    with pytest.raises(BadInput, match=r"99\.png: not an image"):
        read_images((str(tmp_path),), 8, 16)


def test_too_few_pictures_are_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="6 images of 2 classes"):
        read_images((str(picture_folder(tmp_path, 3)),), 8, 16)
    with pytest.raises(BadInput, match="no such folder"):
        read_images((str(tmp_path / "none"),), 8, 16)
    with pytest.raises(BadInput, match="at least 4 for images"):
        read_images((), 8, 2)


def test_the_network_for_images_has_statistics_and_a_class_for_each():
    made = network(channels=3, num_classes=5, width=16)
    assert made(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    # Convolutions 3*4*9 + 4*8*9 + 8*16*9, norms 2*(4 + 8 + 16), linear 16*5 + 5.
    assert sum(p.numel() for p in made.parameters()) == 108 + 288 + 1152 + 56 + 85
    assert any("running_mean" in name for name in made.state_dict())


# Order


def feeds(num_workers: int, batch: int, order: Order) -> list[Feed]:
    return [Feed(order, rank=r, num_workers=num_workers, batch=batch) for r in range(num_workers)]


def test_every_sample_is_seen_once_an_epoch_by_one_worker():
    workers = feeds(2, 3, Order(12, seed=5))
    for _ in range(3):  # epochs, of two batches each
        seen = [n for _ in range(2) for worker in workers for n in worker.next().tolist()]
        assert sorted(seen) == list(range(12))


def test_epochs_and_seeds_have_orders_of_their_own():
    order = Order(50, seed=1)
    first, second = order.take(0, 50), order.take(50, 50)
    assert not torch.equal(first, second)
    assert not torch.equal(first, Order(50, seed=2).take(0, 50))
    assert torch.equal(order.take(40, 20), torch.cat([first[40:], second[:10]]))


def test_another_number_of_workers_sees_the_same_stream_from_where_it_was():
    two = feeds(2, 3, Order(10, seed=3))
    stream = [n for _ in range(4) for worker in two for n in worker.next().tolist()]
    three = feeds(3, 2, Order(10, seed=3))
    for worker in three:
        worker.position = 6  # as if two workers had taken one batch each
    again = [n for _ in range(3) for worker in three for n in worker.next().tolist()]
    assert again == stream[6:]


def test_held_out_batches_visit_all_before_any_comes_again():
    for size in (1, 2, 9, 10, 64):
        visited = [n for b in range(size) for n in held_out_numbers(b, 1, size).tolist()]
        assert sorted(visited) == list(range(size))


def test_the_rate_grows_then_falls_to_its_floor():
    rates = [rate_factor(step, 10, 4, 0.2) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.6)  # half of the way from 1 to 0.2
    assert rates[10] == rates[11] == pytest.approx(0.2)
    assert rate_factor(500, None, 4, 0.2) == 1.0


# The transformer


def test_a_later_byte_does_not_change_earlier_logits():
    torch.manual_seed(0)
    model = Transformer(256, SHAPE)
    symbols = torch.randint(256, (1, 8))
    changed = symbols.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(symbols), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_the_position_of_a_byte_matters():
    torch.manual_seed(0)
    model = Transformer(256, SHAPE)
    same = model(torch.tensor([[7, 9, 1], [9, 7, 1]]))
    assert not torch.allclose(same[0, 2], same[1, 2], atol=1e-6)


def test_parameters_and_the_first_loss_are_as_worked_out():
    torch.manual_seed(0)
    model = Transformer(256, SHAPE)
    hidden = 48  # 16 * 8 / 3 = 42.7, up to a multiple of 8
    layer = 2 * 16 + 3 * 16 * 16 + 16 * 16 + 2 * hidden * 16 + hidden * 16
    assert sum(p.numel() for p in model.parameters()) == 256 * 16 + 2 * layer + 16
    text = Text("random", bytes(range(256)) * 4, SHAPE)
    loss = text.loss(model, text.batch(torch.arange(40)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize(
    ("shape", "said"),
    [({"width": 20}, "give --width 24"), ({"depth": 0}, "--depth must be at least 1")],
)
def test_a_shape_that_makes_no_transformer_is_refused(shape: dict[str, int], said: str):
    with pytest.raises(BadInput, match=said):
        Shape(**{"context": 8, "width": 16, "depth": 1, "heads": 4, **shape})
