"""Megatron's files, written from their public layout and from nothing of ours: numbers one after the other."""

import struct

CODES = {
    "uint8": (1, "B"),
    "int8": (2, "b"),
    "int16": (3, "h"),
    "int32": (4, "i"),
    "int64": (5, "q"),
    "uint16": (8, "H"),
}


def write_megatron(prefix, documents, dtype="uint16"):
    """`documents` are lists of sequences, which are lists of tokens. Gives the prefix."""
    code, letter = CODES[dtype]
    sequences = [sequence for document in documents for sequence in document]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1))
        for sequence in sequences:
            file.write(struct.pack("<i", len(sequence)))
        at = 0
        for sequence in sequences:
            file.write(struct.pack("<q", at))
            at += len(sequence) * struct.calcsize(f"<{letter}")
        first = 0
        for document in documents:
            file.write(struct.pack("<q", first))
            first += len(document)
        file.write(struct.pack("<q", first))
    return prefix
