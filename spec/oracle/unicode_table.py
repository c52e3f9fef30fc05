# SPDX-License-Identifier: BSD-3-Clause
"""Prints src/data/tok_unicode.h: the Unicode data that the package tokenizers has, and that PCRE2 and utf8proc of
Debian 12 (Unicode 14.0) lack.

    $(tools/oracle.sh python) spec/oracle/unicode_table.py > src/data/tok_unicode.h

All data is queried from the package `tokenizers`, code point by code point: the categories of its regular
expressions, and the classes of its BERT normalizer, which use an older Unicode. spec/oracle/tokens_oracle.py checks
that the table is up to date.
"""
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = ["Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf",
              "Po", "Sm", "Sc",
              "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Cn"]
# The first code point that each version of Unicode assigned, as far as the versions are distinguished.
FIRST_OF = {"15.0": 0x0CF3, "15.1": 0x2FFC, "16.0": 0x1C89, "17.0": 0xA7CE}


def categories():
    """Returns the category of each code point in the regular expressions of tokenizers."""
    found = {}
    for name in CATEGORIES:
        split = pre_tokenizers.Split(Regex(r"\p{%s}" % name), "removed")
        for c in ALL:
            if not split.pre_tokenize_str(chr(c)):
                assert c not in found, hex(c)
                found[c] = name
    assert len(found) == len(ALL)
    return found


def ranges(values):
    """Returns [first, last, value] ranges of a dictionary of code points."""
    out = []
    for c in sorted(values):
        if out and out[-1][1] == c - 1 and out[-1][2] == values[c]:
            out[-1][1] = c
        else:
            out.append([c, c, values[c]])
    return out


def stand_in(category, length, now):
    """Returns a code point with this category and number of UTF-8 bytes that is equal in both, and has no other
    letter case."""
    for c in ALL:
        text = chr(c)
        if (now[c] == category == unicodedata.category(text) and len(text.encode()) == length and c != 0x180E
                and text.lower() == text == text.upper() == text.casefold()):
            return c
    for c in ALL:                                             # upper-case letters that fold to the same length
        text = chr(c)
        if (now[c] == category == unicodedata.category(text)
                and len(text.encode()) == length == len(text.casefold().encode())):
            return c
    raise SystemExit("no stand-in for %s of %d bytes" % (category, length))


def table(name, rows, form):
    print("static const %s[] = {" % name)
    line = "   "
    for row in rows:
        text = " " + form(row) + ","
        if len(line) + len(text) > 116:
            print(line)
            line = "   "
        line += text
    print(line + "\n};\n")


def main():
    now = categories()
    version = max(v for v, c in FIRST_OF.items() if now[c] != "Cn")
    newer = {c: (now[c], len(chr(c).encode())) for c in ALL if now[c] != unicodedata.category(chr(c))}
    newer[0x180E] = ("Cf", 3)                                 # PCRE2's \s matches it, although it is not White_Space
    print("/* SPDX-License-Identifier: BSD-3-Clause")
    print(" * Unicode %s where it differs from %s, as spec/oracle/unicode_table.py prints it; do not edit. */" % (
        version, unicodedata.unidata_version))
    print("#ifndef PS_DATA_TOK_UNICODE_H\n#define PS_DATA_TOK_UNICODE_H\n#include <stdint.h>\n")
    print("enum { TOK_UNICODE_MAJOR = %s, TOK_UNICODE_MINOR = %s };\n" % tuple(version.split(".")))
    print("typedef struct tok_range { uint32_t first, last, value; } tok_range;    "
          "/* range of code points, including both */\n")
    print("/* Code points whose category PCRE2 may not know. value: a code point that PCRE2 knows, of the same "
          "category and UTF-8")
    print(" * length. */")
    table("tok_range tok_stand_ins", [(a, b, stand_in(*v, now)) for a, b, v in ranges(newer)],
          lambda r: "{0x%x,0x%x,0x%x}" % r)

    def bert(**on):
        options = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
        return normalizers.BertNormalizer(**dict(options, **on)).normalize_str

    clean, strip, lower = bert(clean_text=True), bert(strip_accents=True), bert(lowercase=True)
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    print("/* BERT's punctuation outside of ASCII, its accents and its control characters, as tokenizers has them. */")
    form = "{0x%x,0x%x,1}"
    rows = [(a, b) for a, b, _ in ranges({c: 1 for c in ALL if c > 127 and len(split("a" + chr(c) + "a")) == 3})]
    table("tok_range tok_bert_punctuation", rows, lambda r: form % r)
    rows = [(a, b) for a, b, _ in ranges({c: 1 for c in ALL if strip(chr(c)) == ""})]
    table("tok_range tok_bert_accents", rows, lambda r: form % r)
    rows = [(a, b) for a, b, _ in ranges({c: 1 for c in ALL if clean("a" + chr(c) + "a") == "aa"})]
    table("tok_range tok_bert_controls", rows, lambda r: form % r)
    print("/* Lower-case letters that utf8proc may not know. value: added to the code point, modulo 2^32. */")
    off = {c: (ord(lower(chr(c))) - c) % 2**32 for c in ALL if c != 0x130 and lower(chr(c)) != chr(c).lower()}
    table("tok_range tok_lower", ranges(off), lambda r: "{0x%x,0x%x,0x%x}" % tuple(r))
    print("#endif")


main()
