"""The other process of `sampling.in_another_process`: a pickled sampling client on standard input, tokens out."""

import base64
import pickle
import sys

from common import PATIENCE, encode, types

sampler = pickle.loads(base64.b64decode(sys.stdin.read()))
prompt = types.ModelInput.from_ints(encode("Q: What is 12 + 34?\nA:"))
answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0)).result(PATIENCE)
print("TOKENS", [list(sequence.tokens) for sequence in answer.sequences])
