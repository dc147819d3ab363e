"""Readers of the files of sinks, without the libraries that wrote them."""

import json
import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _WHOLE, _LAST = 32768, 1, 4  # of LevelDB's log format


def events(directory: Path) -> list[Event]:
    """Return the events of all TensorBoard files (TFRecords), oldest file first."""
    result = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            result.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return result


def wandb_records(run: Path) -> list[Record]:
    """Return the W&B records of an offline run."""
    (path,) = run.glob("*.wandb")
    data, at, part, result = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := _BLOCK - at % _BLOCK) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            result.append(Record.FromString(part))
            part = b""
    return result


def wandb_history(records: list[Record]) -> dict[int, dict[str, float]]:
    """Return metrics by step."""
    return {
        record.history.step.num: {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    }
