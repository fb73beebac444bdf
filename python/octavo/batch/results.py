"""Writes a batch's results, one line each, so that a run which ended anyhow can be resumed.

A line is written with one call once its answer is complete; whatever ends the process leaves whole lines and at most one that
is cut, which the next run removes.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from octavo.errors import ParameterError

_BEGIN: Final = b'{"id": "batch_req_'


class Results:
    """The output file, and what it had when it was opened.

    Args:
        path: made if it does not exist.
        restart: forget what is in it.

    Raises:
        ParameterError: it holds something else, or another process writes to it.
    """

    def __init__(self, path: Path, *, restart: bool = False) -> None:
        self.path = path
        self.custom_ids: set[str] = set()
        """Of the results that were there, those of lines that had one."""
        self.result_ids: set[str] = set()
        """Of the results that were there, those of lines without a `custom_id` or with one that was used before."""
        self.errors = 0
        """Results that are errors, those that were there included."""
        self.written = 0
        """Results in the file."""
        # Read and write, made if absent, never emptied before it is locked.
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            self._lock()
            if restart:
                self._file.truncate(0)
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def write(self, result_id: str, custom_id: str | None, status: int, request_id: str, body: dict[str, Any]) -> None:
        """Adds one result; an `error` in `body` is told at the top as well."""
        error = body.get("error")
        line = {
            "id": result_id,
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None if error is None else {"code": error["code"] or error["type"], "message": error["message"]},
        }
        self.errors += error is not None
        self.written += 1
        # Names that a client invented may hold surrogates; their escapes are JSON too.
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        while data:
            data = data[self._file.write(data) :]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ParameterError("output", str(self.path), "a file to which no other process writes now") from error
        except OSError:  # a file system without locks is no obstacle
            return

    def _scan(self) -> None:
        """Notes what is there, cuts a last line that was not finished, and leaves the position at the end."""
        self._file.seek(0)
        end = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as reader:
            for number, line in enumerate(reader, start=1):
                if not line.endswith(b"\n"):
                    # Only what a result begins with may be cut: the file may be somebody's own.
                    if line[: len(_BEGIN)] != _BEGIN[: len(line)]:
                        raise self._foreign(number)
                    break
                self._note(number, line)
                end += len(line)
        self._file.truncate(end)
        self._file.seek(end)

    def _note(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            result_id, custom_id, error = value["id"], value["custom_id"], value["error"]
            duplicate = error is not None and error["code"] == "duplicate_custom_id"
        except (ValueError, RecursionError, TypeError, KeyError) as wrong:
            raise self._foreign(number) from wrong
        if custom_id is None or duplicate:
            self.result_ids.add(result_id)
        else:
            self.custom_ids.add(custom_id)
        self.errors += error is not None
        self.written += 1

    def _foreign(self, number: int) -> ParameterError:
        allowed = f"a file of batch results (line {number} is none); --restart writes it anew"
        return ParameterError("output", str(self.path), allowed)
