"""Why something failed between ranks, in a few words.

What Gloo raises begins with a place in its sources and ends with advice; a future puts a prefix
before it for every callback that it went through, and a traceback behind.
"""

from __future__ import annotations

import re

_CALLBACK = re.compile(r"^Got the following error when running the callback: (RuntimeError: )?")
_SOURCE = re.compile(r"\[[^\]\s]*:\d+\] ?")  # [/pytorch/third_party/gloo/.../pair.cc:537]
_ADDRESS = re.compile(r" ?\[[0-9a-fA-F.:%]+\]:\d+")  # of a peer, which says less than its rank
_TIMED_OUT = re.compile(r"(?:timed out waiting|time-?out after) (\d+) ?ms", re.IGNORECASE)
_FRAME = re.compile(r"^(At:$|Traceback |Exception raised from |frame #\d+: |File \"|/.*\(\d+\): )")
_MOST = 200  # characters of a text that is none of the known ones

_KNOWN = {
    "connection reset by peer": "connection reset by peer",
    "connection closed by": "connection closed by peer",
    "connection was likely closed": "connection closed by peer",
    "broken pipe": "connection closed by peer",
    "timed out": "no answer in time",
    "application timeout": "no answer in time",
}


def in_words(error: BaseException) -> str:
    r"""Return the reason without paths, addresses and tracebacks.

    >>> in_words(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:80. GLHF!"))
    'connection closed by peer'
    >>> in_words(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    'no answer within 5 s'
    """
    text = _message(str(error))
    if found := _TIMED_OUT.search(text):
        return f"no answer within {int(found[1]) / 1000:g} s"
    for piece, words in _KNOWN.items():
        if piece in text.lower():
            return words
    sentence = text.split(". ")[0].rstrip(".")
    return sentence[:_MOST] or f"{type(error).__name__} without a text"


def _message(text: str) -> str:
    """Return the first line that is none of a traceback, without what is not for people."""
    lines = (line.strip() for line in text.splitlines())
    text = next((line for line in lines if line and not _FRAME.match(line)), "")
    text = _SOURCE.sub("", _ADDRESS.sub("", text))
    while (shorter := _CALLBACK.sub("", text)) != text:
        text = shorter
    return text
