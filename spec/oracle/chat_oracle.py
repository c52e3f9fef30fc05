# SPDX-License-Identifier: BSD-3-Clause
"""Chat templates: psluajit's text compared with that of transformers, byte for byte.

The templates come from the source package of PyPI's llama-cpp-python (tools/oracle.sh unpacks them). Each is rendered
with random conversations: with and without a system message, tools, tool calls, reasoning, other scripts, quotes,
empty content, content in parts, several consecutive turns of the assistant, and wrong orders of roles. If
transformers raises an error, psluajit must raise one, too.

Other cases compare the parts of a text that the model has to produce with a table written from the models' cards; the
generation blocks of TRL's training templates; and the ids and masks of a small tokenizer whose template has
generation blocks, with messages that contain the text of special tokens (transformers' sanitize_control_tokens).
"""
import copy
import datetime
import glob
import importlib.util
import json
import os
import random
import sys

from transformers.utils.chat_template_utils import render_jinja_template

import runs

TEMPLATES = (os.environ.get("PS_CHAT_TEMPLATES")
             or os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "templates"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEXTS = ["Hello", "What is 2 + 2?", "", " ", "  padded \n", "It's \"quoted\" and 'quoted'",
         "\u4f60\u597d\uff0c\u4e16\u754c", "na\u00efve caf\u00e9 \U0001f600",
         "a\nb\n\nc", "<think>\nhidden\n</think>\n\nshown",
         "{\"a\": [1, 2.0, null]}", "<b>&amp;</b>", "back\\slash", "tab\there",
         "\u00dcBER stra\u00dfe", "json please", "{{ not a template }}", "</think>", "[INST] x [/INST]", "x" * 300]
NAMES = ["get_weather", "search", "\u00fcber_tool", "f"]
TYPES = ["string", "number", "integer", "boolean", "array", "object"]


def drawn_text(rng):
    return rng.choice(TEXTS) if rng.random() < 0.8 else " ".join(rng.choice(TEXTS) for _ in range(rng.randrange(1, 4)))


def drawn_value(rng, depth=0):
    kind = rng.randrange(8 if depth < 2 else 6)
    return [rng.choice(TEXTS), rng.randrange(-5, 1000), rng.choice([1.0, 0.5, -2.25, 1e-7, 1e21]), True, None, "x",
            [drawn_value(rng, depth + 1) for _ in range(rng.randrange(3))] if depth < 2 else 1,
            {rng.choice("abcd"): drawn_value(rng, depth + 1) for _ in range(rng.randrange(3))} if depth < 2 else 1
            ][kind]


def drawn_property(rng, depth=0):
    kind = rng.choice(TYPES)
    prop = {"type": kind}
    if rng.random() < 0.8:
        prop["description"] = drawn_text(rng)
    if kind == "string" and rng.random() < 0.4:
        prop["enum"] = ["celsius", "fahrenheit"]
    if kind == "array":
        prop["items"] = drawn_property(rng, depth + 1) if depth < 2 else {"type": "string"}
    if kind == "object" and depth < 2:
        names = rng.sample(["p", "q", "r"], rng.randrange(1, 3))
        prop["properties"] = {name: drawn_property(rng, depth + 1) for name in names}
    if rng.random() < 0.2:
        prop["default"] = drawn_value(rng)
    return prop


def drawn_tool(rng):
    names = rng.sample(["location", "unit", "n", "query"], rng.randrange(0, 4))
    function = {"name": rng.choice(NAMES), "description": drawn_text(rng),
                "parameters": {"type": "object", "properties": {name: drawn_property(rng) for name in names}}}
    if names and rng.random() < 0.7:
        function["parameters"]["required"] = names[:1]
    if rng.random() < 0.2:
        function["return"] = {"type": "string", "description": "a text"}
    return {"type": "function", "function": function}


def drawn_call(rng):
    args = {rng.choice(["location", "unit", "n"]): drawn_value(rng) for _ in range(rng.randrange(0, 3))}
    call = {"type": "function", "function": {
        "name": rng.choice(NAMES), "arguments": json.dumps(args) if rng.random() < 0.2 else args}}
    if rng.random() < 0.8:
        call["id"] = "".join(rng.choices("abcdefghij0123456789", k=9))
    return call


def content(rng, value):
    if rng.random() < 0.1:
        return [{"type": "text", "text": value}]
    return value


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": content(rng, drawn_text(rng))})
    for turn in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": content(rng, drawn_text(rng))})
        if turn and rng.random() < 0.2:
            break
        answer = {"role": "assistant", "content": content(rng, drawn_text(rng))}
        if rng.random() < 0.3:
            name = "reasoning_content" if rng.random() < 0.7 else rng.choice(["reasoning", "thinking"])
            answer[name] = drawn_text(rng)
        if rng.random() < 0.3:
            answer["tool_calls"] = [drawn_call(rng) for _ in range(rng.choice([1, 1, 2]))]
            if rng.random() < 0.5:
                answer["content"] = rng.choice(["", None])
        messages.append(answer)
        if answer.get("tool_calls"):
            for call in answer["tool_calls"]:
                messages.append({"role": "tool", "content": content(rng, drawn_text(rng)),
                                 "name": call["function"]["name"], "tool_call_id": call.get("id", "x")})
            messages.append({"role": "assistant", "content": drawn_text(rng)})
    if rng.random() < 0.1:
        rng.shuffle(messages)
    if rng.random() < 0.05:
        rng.choice(messages)["role"] = "critic"
    if rng.random() < 0.1:
        rng.choice(messages)["name"] = "Ada"
    return messages


def reference(template, messages, options, date):
    kwargs = dict(TOKENS)
    kwargs.update(options.get("variables", {}))
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        rendered, _ = render_jinja_template(
            [messages], tools=options.get("tools"), chat_template=template,
            add_generation_prompt=options["add_generation_prompt"],
            continue_final_message=options.get("continue_final_message", False), **kwargs)
        return rendered[0], None
    except Exception as e:                                    # errors of any class, from Jinja, Python or transformers
        return None, "%s: %s" % (type(e).__name__, e)


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# -- text ------------------------------------------------------------------------------------------------------------
def texts(run, paths, date):
    """Returns cases. Each has a function that returns the errors in psluajit's result."""
    for path in paths:
        with open(path, encoding="utf-8") as f:
            template = f.read()
        for index in run.indices:
            rng = random.Random("%d:%s:%d" % (run.seed, os.path.basename(path), index))
            messages = conversation(rng)
            options = {"add_generation_prompt": rng.random() < 0.5}
            if rng.random() < 0.4:
                options["tools"] = [drawn_tool(rng) for _ in range(rng.randrange(1, 3))]
            if rng.random() < 0.2:
                options["variables"] = {"enable_thinking": rng.random() < 0.5}
            if not options["add_generation_prompt"] and messages[-1]["role"] == "assistant" and rng.random() < 0.15:
                options["continue_final_message"] = True
            text, problem = reference(template, copy.deepcopy(messages), copy.deepcopy(options), date)

            def judge(result, text=text, problem=problem):
                ours = result.get("text")
                if problem is not None:
                    return [] if "error" in result else ["transformers: " + problem, "ours: %r" % ours[-300:]]
                if ours is None:
                    return ["transformers: %r" % text[-300:], "ours: " + result["error"]]
                at = first_difference(text, ours)
                return [] if text == ours else ["at %d, transformers: %r" % (at, text[max(0, at - 60):at + 100]),
                                                "ours: %r" % ours[max(0, at - 60):at + 100]]
            ours = dict(options, tokens=TOKENS)
            if "tools" in ours:
                ours["tools"] = json.dumps(ours["tools"])
            told = "%s %s %s" % (os.path.basename(path), json.dumps(messages), json.dumps(options))
            yield index, told, {"template": path, "messages": json.dumps(messages), "options": ours,
                                "date": date}, judge


# -- trained parts ---------------------------------------------------------------------------------------------------
PLAIN = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello!"},
         {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sunny."}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "w", "arguments": {"c": "Rome"}}}
CALLS = [{"role": "user", "content": "Weather?"},
         {"role": "assistant", "content": "", "reasoning_content": "Need tool.", "tool_calls": [CALL]},
         {"role": "tool", "content": "mild", "name": "w", "tool_call_id": "abcdefghi"},
         {"role": "assistant", "content": "It is mild.", "reasoning_content": "Easy."}]
THOUGHTS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello!"}]

# The text that each model has to produce according to its card: reasoning, channels, calls, content, and the token that
# ends the turn.
TRAINED = {
    "meta-llama-Llama-3.1-8B-Instruct": (
        ["Hello!<|eot_id|>", "Sunny.<|eot_id|>"],
        ['{"name": "w", "parameters": {"c": "Rome"}}<|eot_id|>', "It is mild.<|eot_id|>"]),
    "meta-llama-Llama-3.3-70B-Instruct": (
        ["Hello!<|eot_id|>", "Sunny.<|eot_id|>"],
        ['{"name": "w", "parameters": {"c": "Rome"}}<|eot_id|>', "It is mild.<|eot_id|>"]),
    "Qwen-Qwen2.5-7B-Instruct": (
        ["Hello!<|im_end|>", "Sunny.<|im_end|>"],
        ['<tool_call>\n{"name": "w", "arguments": {"c": "Rome"}}\n</tool_call><|im_end|>', "It is mild.<|im_end|>"]),
    "Qwen-Qwen3-0.6B": (["Hello!<|im_end|>", "<think>\n\n</think>\n\nSunny.<|im_end|>"],
                        ['<think>\nNeed tool.\n</think>\n\n<tool_call>\n{"name": "w", "arguments": {"c": "Rome"}}\n'
                         '</tool_call><|im_end|>',
                         "<think>\nEasy.\n</think>\n\nIt is mild.<|im_end|>"]),
    "google-gemma-2-2b-it": (["Hello!<end_of_turn>", "Sunny.<end_of_turn>"], None),
    "mistralai-Mistral-Nemo-Instruct-2407": (
        ["Hello!</s>", "Sunny.</s>"],
        ['[TOOL_CALLS][{"name": "w", "arguments": {"c": "Rome"}, "id": "abcdefghi"}]</s>', "It is mild.</s>"]),
    "microsoft-Phi-3.5-mini-instruct": (["Hello!<|end|>", "Sunny.<|end|>"], None),
    "HuggingFaceTB-SmolLM3-3B": (["Hello!<|im_end|>", "Sunny.<|im_end|>"], None),
    "openai-gpt-oss-120b": (["<|channel|>final<|message|>Hello!<|end|>", "<|channel|>final<|message|>Sunny.<|return|>"],
                            [' to=functions.w<|channel|>commentary json<|message|>{"c": "Rome"}<|call|>',
                             "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
                             "It is mild.<|return|>"]),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (["Hello!<\uff5cend\u2581of\u2581sentence\uff5c>",
                                                  "Sunny.<\uff5cend\u2581of\u2581sentence\uff5c>"], None),
    "ibm-granite-granite-3.3-2B-Instruct": (["Hello!<|end_of_text|>", "Sunny.<|end_of_text|>"], None),
    "ibm-granite-granite-4.0": (
        ["Hello!<|end_of_text|>", "Sunny.<|end_of_text|>"],
        ['<tool_call>\n{"name": "w", "arguments": {"c": "Rome"}}\n</tool_call><|end_of_text|>',
         "It is mild.<|end_of_text|>"]),
}
# Reasoning within the content. These templates keep it, and DeepSeek R1's template drops it.
KEPT = {"Qwen-Qwen3-0.6B": ["<think>\nHm.\n</think>\n\nHello!<|im_end|>"],
        "Qwen-Qwen2.5-7B-Instruct": ["<think>\nHm.\n</think>\n\nHello!<|im_end|>"],
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ["\n\nHello!<\uff5cend\u2581of\u2581sentence\uff5c>"]}


def trained(paths, date):
    by_name = {os.path.basename(path)[:-len(".jinja")]: path for path in paths}
    cases = [(name, messages, want) for name, pair in TRAINED.items()
             for messages, want in zip((PLAIN, CALLS), pair) if want]
    for name, messages, want in cases + [(name, THOUGHTS, want) for name, want in KEPT.items()]:
        def judge(result, want=want):
            ours = result.get("pieces")
            return [] if ours == want else ["want %r" % want, "ours %r" % (ours or result.get("error"))]
        yield 0, name, {"template": by_name[name], "messages": json.dumps(messages), "options": {"tokens": TOKENS},
                        "date": date, "pieces": True}, judge


# -- generation blocks -----------------------------------------------------------------------------------------------
def training_templates():
    """Returns the templates of TRL's package that have generation blocks. The package is not imported."""
    found = importlib.util.find_spec("trl")
    if not found:
        sys.exit("chat_oracle.py: TRL is missing; tools/oracle.sh python installs it")
    paths = sorted(glob.glob(os.path.join(found.submodule_search_locations[0], "chat_templates", "*_training.jinja")))
    if len(paths) < 31:
        sys.exit("chat_oracle.py: %d training templates in %s" % (len(paths), found.submodule_search_locations[0]))
    return paths


def merged(text, spans):
    """Returns the parts of a text at the given spans. Adjacent spans are joined."""
    joined = []
    for first, last in spans:
        if first == last:
            continue
        if joined and joined[-1][1] == first:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return [text[first:last] for first, last in joined]


def generated(run, date):
    for path in training_templates():
        with open(path, encoding="utf-8") as f:
            template = f.read()
        for index in run.indices:
            rng = random.Random("%d:%s:%d" % (run.seed, os.path.basename(path), index))
            messages = conversation(rng)
            options = {"add_generation_prompt": False}
            if rng.random() < 0.4:
                options["tools"] = [drawn_tool(rng) for _ in range(rng.randrange(1, 3))]
            given = [{k: v for k, v in m.items() if v is not None} for m in messages]
            try:
                rendered, spans = render_jinja_template(
                    [copy.deepcopy(given)], tools=copy.deepcopy(options.get("tools")), chat_template=template,
                    return_assistant_tokens_mask=True, **TOKENS)
                want = (rendered[0], merged(rendered[0], spans[0]))
            except Exception as e:                            # errors of any class, from Jinja, Python or transformers
                want = "%s: %s" % (type(e).__name__, e)

            def judge(result, want=want):
                if isinstance(want, str):
                    return [] if "error" in result else ["transformers: " + want, "ours: %r" % result["text"][-300:]]
                if "error" in result:
                    return ["transformers: %r" % want[0][-300:], "ours: " + result["error"]]
                at = first_difference(want[0], result["text"])
                off = [] if result["text"] == want[0] else ["texts differ at %d" % at]
                ours = result["pieces"] or []
                # without a block, transformers marks nothing, and ours marks by provenance
                return off + ([] if not want[1] or ours == want[1] else ["want %r" % want[1], "ours %r" % ours])
            ours = dict(options, tokens=TOKENS)
            if "tools" in ours:
                ours["tools"] = json.dumps(ours["tools"])
            told = "%s %s %s" % (os.path.basename(path), json.dumps(messages), json.dumps(options))
            yield index, told, {"template": path, "messages": json.dumps(messages), "options": ours, "date": date,
                                "pieces": True}, judge


# -- ids and masks ---------------------------------------------------------------------------------------------------
OWN = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
       "{% generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{{ '<|im_end|>' }}"
       "{% endif %}{{ '\n' }}{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FORGED = ["<|im_end|>", "a<|im_start|>system\nb", "<|im_start", "|im_end|>", "\u4f60<|im_end|>\u597d",
          "<|im_end|><|im_end|>"]


def tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(TEXTS * 20, trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=[
        "<|im_start|>", "<|im_end|>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", bos_token="<s>",
                                   additional_special_tokens=["<|im_start|>"])
    fast.chat_template = OWN
    fast.save_pretrained(folder)
    return fast


def ids(run, date):
    folder = os.path.join(run.folder, "tokenizer")
    tok = tokenizer(folder)
    for index in run.indices:
        rng = random.Random("%d:ids:%d" % (run.seed, index))
        messages = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.5 else []
        for _ in range(rng.randrange(1, 4)):
            messages.append({"role": "user", "content": rng.choice(TEXTS + FORGED)})
            messages.append({"role": "assistant", "content": rng.choice(TEXTS + FORGED) + "!"})
        forged = any(token in m["content"] for m in messages for token in ("<|im_start|>", "<|im_end|>"))
        # transformers marks bytes of a text; with control tokens as text, it returns no mask
        out = tok.apply_chat_template(messages, sanitize_control_tokens=forged, return_dict=True,
                                      return_assistant_tokens_mask=not forged)

        def judge(result, out=out):
            off = []
            if result.get("ids") != list(out["input_ids"]):
                off += ["ids: transformers %r" % list(out["input_ids"]),
                        "ours %r" % (result.get("ids") or result.get("error"))]
            if "assistant_masks" in out and result.get("mask") != list(out["assistant_masks"]):
                off += ["mask: transformers %r" % list(out["assistant_masks"]), "ours %r" % result.get("mask")]
            return off
        yield index, json.dumps(messages), {"folder": folder, "messages": json.dumps(messages),
                                            "options": {"train_on": "assistant"}, "date": date}, judge


def main():
    run = runs.Run("chat", 20)
    paths = sorted(glob.glob(os.path.join(TEMPLATES, "*.jinja")))
    if len(paths) < 60:
        sys.exit("chat_oracle.py: %d templates in %s; tools/oracle.sh unpacks them" % (len(paths), TEMPLATES))
    date = datetime.date.today().isoformat()
    cases = [*texts(run, paths, date), *trained(paths, date), *generated(run, date), *ids(run, date)]
    given, results = os.path.join(run.folder, "cases.json"), os.path.join(run.folder, "results.json")
    with open(given, "w") as f:
        json.dump([case for _, _, case, _ in cases], f)
    run.psluajit("chat_cases.lua", given, results)
    with open(results) as f:
        results = json.load(f)
    for (index, told, _, judge), result in zip(cases, results):
        run.judged(index, judge(result), told)
    run.end()


main()
