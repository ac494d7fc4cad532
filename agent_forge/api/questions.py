"""What /v1 may be asked. A field that would be ignored is refused; names come from others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from agent_forge.infer.generate import CACHED_TOKENS, LOWEST_TEMPERATURE, SamplingSettings

DEFAULT_TOKENS = 512
Name = Annotated[str, Field(min_length=1, max_length=512)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Stop = Annotated[str, Field(min_length=1, max_length=128)]
Tokens = Annotated[int, Field(ge=1, le=CACHED_TOKENS)]


class Part(BaseModel):
    """What all that is asked has in common."""

    model_config = ConfigDict(extra="forbid")


class TextPart(Part):
    type: Literal["text"]
    text: str


class CalledFunction(Part):
    name: ToolName
    arguments: str = "{}"


class Call(Part):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # of an earlier reply; not read again
    refusal: None = None

    def plain(self) -> dict[str, Any]:
        """The message as tokenizers know it."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else self.content or ""
        said: dict[str, Any] = {"role": self.role, "content": text}
        said["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls:
            said["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return said


class Parameters(Part):
    model_config = ConfigDict(extra="allow")
    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any]] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class Function(Part):
    name: ToolName
    description: str = ""
    parameters: Parameters = Parameters()
    strict: bool | None = None


class ToolSchema(Part):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: ToolName


class ToolChoice(Part):
    type: Literal["function"]
    function: FunctionName


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Question(Part):
    """Shared by chats and completions."""

    model: Name
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: Literal[1] = 1
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    user: str | None = None

    def sampling(self, tokens: int | None, seed: int) -> SamplingSettings:
        temperature = 1.0 if self.temperature is None else self.temperature
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingSettings(
            max_new_tokens=tokens or DEFAULT_TOKENS,
            temperature=temperature if temperature >= LOWEST_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=(seed if self.seed is None else self.seed) % 2**63,
            stop_strings=tuple(stops),
        )


class ChatQuestion(Question):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[ToolSchema], Field(max_length=64)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class CompletionQuestion(Question):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
