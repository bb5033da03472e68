"""Run inside a sandbox: the package `google-genai`, unmodified, calls the bridge and prints the answers.

The models' names select their behaviour; `scripted_model.py` has them. Needs nothing of this repository.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from google import genai
from google.genai import errors, types

#: Reads GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY.
client: Any = genai.Client()
models = client.models
tools: list[Any] = [
    types.Tool(function_declarations=[types.FunctionDeclaration(name="weather", description="Asks.")])
]
by_hand = types.GenerateContentConfig(
    tools=tools, automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True)
)
got: dict[str, Any] = {"models": [model.name.removeprefix("models/") for model in models.list()]}

whole = models.generate_content(model="say", contents="hello")
got["whole"] = whole.text
got["usage"] = [whole.usage_metadata.prompt_token_count, whole.usage_metadata.candidates_token_count]

pieces = []
for answer in models.generate_content_stream(model="steps", contents="hello"):
    if answer.text:
        pieces.append(answer.text)
        # The model goes on at a request of the client: a piece that came late would hang here.
        models.generate_content(model="step", contents="hello")
got["pieces"] = pieces

requested = models.generate_content(model="tools", contents="hello", config=by_hand)
call = requested.function_calls[0]
result = types.Part.from_function_response(name=call.name, response={"result": f"rain in {call.args['city']}"})
turns = [
    types.Content(role="user", parts=[types.Part(text="hello")]),
    requested.candidates[0].content,
    types.Content(role="user", parts=[result]),
]
got["tools"] = models.generate_content(model="tools", contents=turns, config=by_hand).text
streamed = models.generate_content_stream(model="tools", contents="hello", config=by_hand)
got["streamed tool"] = [
    [call.name, json.dumps(call.args)] for answer in streamed for call in answer.function_calls or []
]

try:
    models.generate_content(model="refused", contents="hello")
except errors.ClientError as error:
    got["error"] = [error.code, error.message]

stream = models.generate_content_stream(model="endless", contents="hello")
next(answer for answer in stream if answer.text)
stream.close()
got["left"] = models.generate_content(model="left", contents="hello").text
got["counted"] = models.count_tokens(model="say", contents="hello").total_tokens > 0

print(json.dumps(got), flush=True)
# The last one is left by a client that dies.
stream = models.generate_content_stream(model="endless", contents="hello")
next(answer for answer in stream if answer.text)
os.kill(os.getpid(), signal.SIGKILL)
