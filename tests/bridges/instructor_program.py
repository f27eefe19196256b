"""A program that uses instructor, for its own venv: ``instructor_program.py MODE``.

It requests a sum as a pydantic model and prints its reward.
"""

import json
import os
import sys

import instructor
from pydantic import BaseModel, Field


class Sum(BaseModel):
    """The sum of two numbers."""

    value: int = Field(description="The sum.")


with open(os.environ["AGENTRL_SAMPLE"]) as file:
    numbers = json.load(file)["data"]
client = instructor.from_provider("openai/policy", mode=instructor.Mode[sys.argv[1]])
question = f"What is {numbers['a']} + {numbers['b']}?"
found = client.create(response_model=Sum, messages=[{"role": "user", "content": question}], max_retries=0)
print(json.dumps({"reward": float(found.value == numbers["a"] + numbers["b"])}))
