# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import dataclass
from typing import ClassVar

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.contract import Codec, Result


@dataclass(frozen=True, eq=False, kw_only=True)
class Brightness(Result):
    task: ClassVar[str] = "toy"
    value: float

    def to_dict(self):
        return {"brightness": self.value}

    def to_text(self):
        return f"brightness  {self.value:.2f}"


class BrightnessCodec(Codec):
    suffixes = (".json",)

    def encode(self, found, suffix):
        (result,) = found.values()
        return json.dumps(result.to_dict()).encode()

    def decode(self, path):
        try:
            return {path.stem: Brightness(value=json.loads(path.read_text())["brightness"])}
        except (OSError, ValueError, LookupError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
