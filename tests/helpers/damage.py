"""Damaged files of tensors."""

WAYS = ["cut", "empty", "cut in the header", "a byte of a tensor", "a byte of the notes"]


def damage(content, how):
    if how == "cut":
        return content[: len(content) // 2]
    if how == "empty":
        return b""
    if how == "cut in the header":
        return content[:20]
    place = len(content) - 3 if how == "a byte of a tensor" else content.index(b"notes") + 12
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
