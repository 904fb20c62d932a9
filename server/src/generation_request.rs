//! Options for answering a conversation, common to all interfaces.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use qhx::{CancelToken, Grammar, Request, SamplingParams, Speculate, TextPipeline, Tool};
use serde_json::{Map, Value, json};

use crate::answer::{Answers, Reader};
use crate::conversation::{Conversation, Part, Turn, parts};
use crate::custom_tools::{custom, shown};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, tokens, wrong};
use crate::pending::Pending;
use crate::queue::Work;
use crate::registry::{Ability, Info, Served};
use crate::request::Context;

/// Choices of one request.
const MAX_CHOICES: u64 = 16;
/// Stop texts of one request.
const MAX_STOPS: usize = 16;
/// Tokens of one request whose logits are biased.
const MAX_BIASES: usize = 1024;
/// Fields of generation that other servers' interfaces have under the same names.
pub(crate) const GENERATION: [&str; 9] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
];
/// Fields of other servers that would change an answer.
pub(crate) const UNSUPPORTED: [&str; 23] = [
    "bad_words",
    "dynatemp_range",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "include_stop_str_in_output",
    "json_schema",
    "min_tokens",
    "mirostat",
    "prompt_logprobs",
    "regex",
    "structured_outputs",
    "top_a",
    "truncate_prompt_tokens",
    "use_beam_search",
    "dry_multiplier",
    "xtc_probability",
    "top_n_sigma",
    "allowed_token_ids",
    "logits_processors",
    "n_probs",
];
/// Fields of chats that are refused.
pub(crate) const REFUSED: [&str; 4] = ["functions", "function_call", "audio", "web_search_options"];
/// Tokens that are kept free for an answer whose length is not given.
const DEFAULT_ANSWER: usize = 1024;
/// Log-probabilities in the place of a token.
pub(crate) const MAX_TOP: u64 = 20;

/// A conversation and the options for its answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ask {
    pub turns: Vec<Turn>,
    /// The tools, as chat templates take them.
    pub tools: Vec<Value>,
    pub choice: ToolChoice,
    /// True if there may be several calls.
    pub several_calls: bool,
    pub format: Option<Grammar>,
    pub sampling: Sampling,
    pub max_new: Option<usize>,
    pub stop: Vec<String>,
    pub ends: Ends,
    pub choices: usize,
    pub logprobs: Option<usize>,
    pub thinking: Option<bool>,
    /// Sets the states of its conversations apart from those of others.
    pub cache_salt: Option<String>,
    /// The oldest messages may be left out where all are more than the context holds.
    pub truncates: bool,
    /// Text that is expected to be the answer, or much of it.
    pub prediction: Option<String>,
    /// Further variables of the template.
    pub arguments: Map<String, Value>,
}

/// Ends of an answer besides texts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ends {
    /// Tokens.
    pub tokens: Vec<u32>,
    /// It goes on behind the model's own end.
    pub ignore_eos: bool,
}

/// Which tools are called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
    One(String),
}

/// An answer that is being made.
pub(crate) struct GenerationRequest {
    pub pending: Pending,
    pub answers: Answers,
    pub texts: Arc<TextPipeline>,
    pub model: String,
    /// Sampling of its tokens.
    pub sampling: SamplingParams,
}

impl Ask {
    /// A request of OpenAI's chats.
    pub(crate) fn of_chat(fields: &Fields<'_>) -> Result<Self> {
        fields.unsupported(&UNSUPPORTED)?;
        fields.unsupported(&REFUSED)?;
        fields.only("modalities", &json!(["text"]))?;
        let messages = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
        let turn = |(at, message)| Turn::of_chat(message, &format!("messages[{at}]"));
        let top = fields.count("top_logprobs", 0, MAX_TOP)?;
        let logprobs = fields.flag("logprobs")?.unwrap_or(top.is_some());
        let max_new = fields.count("max_completion_tokens", 1, u32::MAX.into())?;
        let kwargs = fields.object("chat_template_kwargs")?;
        let (thinking, arguments) = kwargs.map_or(Ok((None, Map::new())), template_arguments)?;
        let mut ask = Self {
            turns: messages.iter().enumerate().map(turn).collect::<Result<_>>()?,
            tools: tools(fields)?,
            choice: ToolChoice::read(fields)?,
            several_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
            format: fields.object("response_format")?.map_or(Ok(None), |f| format(&f))?,
            sampling: Sampling::read(fields)?,
            max_new: max_new
                .map_or_else(|| fields.count("max_tokens", 1, u32::MAX.into()), |n| Ok(Some(n)))?,
            stop: stops(fields, "stop")?,
            ends: Ends::read(fields)?,
            choices: fields.count("n", 1, MAX_CHOICES)?.unwrap_or(1),
            logprobs: logprobs.then_some(top.unwrap_or(0)),
            thinking,
            cache_salt: cache_salt(fields)?,
            truncates: false,
            prediction: prediction(fields)?,
            arguments,
        };
        ask.effort(fields.text("reasoning_effort")?);
        let continues = ask.continues().is_some();
        for (field, of_continuing) in
            [("continue_final_message", true), ("add_generation_prompt", false)]
        {
            if fields.flag(field)?.is_some_and(|flag| (flag == of_continuing) != continues) {
                let message = "a last message of the assistant is continued, and no other is";
                return Err(ApiError::bad(field, message).code("unsupported"));
            }
        }
        Ok(ask)
    }

    /// Sets the reasoning effort of the model.
    pub(crate) fn effort(&mut self, effort: Option<&str>) {
        match effort {
            None => {}
            Some("none") => self.thinking = Some(false),
            Some(effort) => {
                self.arguments.insert("reasoning_effort".to_owned(), effort.into());
            }
        }
    }

    /// The content of the message that the answer goes on with.
    fn continues(&self) -> Option<String> {
        self.turns.last().filter(|turn| turn.role == "assistant").map(Turn::texts)
    }

    /// The tools that may be called.
    fn callable(&self) -> Result<Vec<Tool>> {
        if self.tools.is_empty() || self.choice == ToolChoice::None {
            return Ok(Vec::new());
        }
        let all = Tool::list(&self.tools.clone().into())
            .map_err(|e| ApiError::bad("tools", e.message()).code("invalid_value"))?;
        let ToolChoice::One(name) = &self.choice else { return Ok(all) };
        let one = all.into_iter().find(|tool| tool.name == *name);
        let missing = || ApiError::bad("tool_choice", format_args!("there is no tool {name:?}"));
        one.map(|tool| vec![tool]).ok_or_else(missing)
    }

    /// True where the answer is calls and nothing else.
    fn must_call(&self) -> bool {
        !self.tools.is_empty() && !matches!(self.choice, ToolChoice::Auto | ToolChoice::None)
    }

    /// True where the answer has no form from its first token on.
    fn is_free(&self) -> bool {
        self.format.is_none() && !self.must_call()
    }

    /// True where the model is to think, `None` where its template decides. An answer that has a form leaves no room
    /// for it.
    fn thinking(&self) -> Option<bool> {
        self.thinking.or((!self.is_free()).then_some(false))
    }

    fn grammar(&self, tools: &[Tool]) -> Option<Grammar> {
        match (&self.format, tools) {
            (format, []) => format.clone(),
            // A call, or an answer of the format.
            (Some(format), tools) if self.choice == ToolChoice::Auto => {
                format.clone().or_calls(tools.to_vec())
            }
            (None, tools) if self.choice == ToolChoice::Auto => {
                Some(Grammar::OptionalCalls(tools.to_vec()))
            }
            (_, tools) => Some(Grammar::Calls(tools.to_vec())),
        }
    }

    /// The template's variables, the conversation among them where it has more than texts.
    fn variables(&self, conversation: &Conversation) -> Map<String, Value> {
        let mut arguments = self.arguments.clone();
        if let Some(messages) = &conversation.template {
            arguments.insert("messages".to_owned(), messages.clone());
        }
        if !self.tools.is_empty() && self.choice != ToolChoice::None {
            let shown = self.tools.iter().cloned().map(shown);
            arguments.insert("tools".to_owned(), shown.collect());
        }
        arguments
    }

    /// The same with messages of the system where the template takes them, if it refuses them where they are: all at
    /// the beginning, or in front of what the user says first.
    pub(crate) fn accommodated(self, info: &Info, cancel: &CancelToken) -> Self {
        let (texts, system) = (&*info.texts, |turn: &Turn| turn.role == "system");
        let usual = match self.turns.iter().rposition(system) {
            None => true,
            Some(0) => info.takes_system(cancel),
            Some(_) => self.render(texts, cancel).is_ok(),
        };
        if usual {
            return self;
        }
        let (instructions, mut rest): (Vec<_>, Vec<_>) =
            self.turns.iter().cloned().partition(system);
        let instructions: Vec<_> = instructions.iter().map(Turn::texts).collect();
        let instructions = instructions.join("\n\n");
        let first = Turn::text("system", instructions.clone());
        let merged = Self { turns: [vec![first], rest.clone()].concat(), ..self.clone() };
        if merged.render(texts, cancel).is_ok() {
            return merged;
        }
        if let Some(user) = rest.iter_mut().find(|turn| turn.role == "user") {
            user.parts.insert(0, Part::Text(format!("{instructions}\n")));
        }
        let moved = Self { turns: rest, ..self.clone() };
        // Else the template says what it refuses.
        if moved.render(texts, cancel).is_ok() { moved } else { self }
    }

    /// The same without its oldest messages, as far as the context does not hold them: exchanges before the last
    /// question first, and then the oldest calls behind it with their results.
    fn fitted(self, texts: &TextPipeline, cancel: &CancelToken) -> Self {
        if !self.truncates {
            return self;
        }
        let answer = self.max_new.unwrap_or(DEFAULT_ANSWER).min(texts.max_ctx() / 2);
        let room = texts.max_ctx() - answer;
        let fits = |ask: &Self| {
            let prompt = ask.render(texts, cancel).ok();
            let tokens = prompt.zip(texts.tokenizer()).map(|(text, it)| it.encode(&text, false));
            tokens.is_none_or(|tokens| tokens.is_ok_and(|tokens| tokens.len() <= room))
        };
        if fits(&self) {
            return self;
        }
        let turns = &self.turns;
        let question = turns.iter().rposition(|turn| turn.role == "user").unwrap_or(0);
        // What may be left out, in the order in which it is: a question with its answers, or calls with their results.
        let begins = |&at: &usize| match turns[at].role.as_str() {
            "user" => at <= question,
            "assistant" => at > question,
            _ => false,
        };
        let starts: Vec<_> = (0..turns.len()).filter(begins).collect();
        let without = |count: usize| {
            let ranges =
                starts.iter().enumerate().filter(|(_, start)| **start != question).take(count);
            let left_out = |at: usize| {
                let within = |&(index, start): &(usize, &usize)| {
                    (*start..starts.get(index + 1).copied().unwrap_or(turns.len())).contains(&at)
                };
                ranges.clone().any(|range| within(&range))
            };
            let kept = turns.iter().enumerate();
            let kept = kept.filter(|(at, turn)| turn.role == "system" || !left_out(*at));
            Self { turns: kept.map(|(_, turn)| turn.clone()).collect(), ..self.clone() }
        };
        // The last of them stays.
        let (mut least, mut most) = (1, starts.len().saturating_sub(2).max(1));
        while least < most {
            let middle = usize::midpoint(least, most);
            if fits(&without(middle)) { most = middle } else { least = middle + 1 }
        }
        without(least)
    }

    /// The conversation's texts as the model's template writes them.
    pub(crate) fn render(&self, texts: &TextPipeline, cancel: &CancelToken) -> qhx::Result<String> {
        let conversation = Conversation::of_texts(&self.turns);
        let variables = self.variables(&conversation);
        texts.render(&conversation.messages, self.thinking(), &variables, cancel)
    }

    /// The prompt, without how it is to be answered.
    pub(crate) fn prompt(&self, conversation: Conversation) -> Request {
        let arguments = self.variables(&conversation);
        let request = Request::chat(conversation.messages).template_arguments(arguments);
        match self.thinking() {
            Some(thinks) => request.thinking(thinks),
            None => request,
        }
    }

    pub(crate) fn has_media(&self) -> bool {
        self.turns.iter().any(Turn::has_media)
    }

    /// Has a model answer. This may load the model: it takes time.
    pub(crate) fn submit(
        self,
        context: &Context,
        model: &Arc<Served>,
    ) -> Result<GenerationRequest> {
        let info = context.info(model)?;
        if !info.texts.can_chat() {
            let message = format!("{} completes texts and does not chat", model.name);
            return Err(ApiError::bad("model", message).code("model_not_supported"));
        }
        if self.turns.is_empty() {
            return Err(ApiError::bad("messages", "there are none").code("invalid_value"));
        }
        let ticket = context.ticket();
        let this = self.accommodated(&info, &ticket).fitted(&info.texts, &ticket);
        this.answered(context, model, &info, ticket)
    }

    fn answered(
        self,
        context: &Context,
        model: &Arc<Served>,
        info: &Arc<Info>,
        ticket: CancelToken,
    ) -> Result<GenerationRequest> {
        let tools = self.callable()?;
        let grammar = self.grammar(&tools);
        let free = self.is_free();
        if !free && self.continues().is_some_and(|content| !content.trim().is_empty()) {
            let message = "the last message is the assistant's, and what is added to it has no form of its own: leave \
                           out response_format and tool_choice, or end with a message of the user";
            return Err(ApiError::bad("messages", message).code("unsupported"));
        }
        let mut conversation = Conversation::new(&self.turns, info)?;
        let turns = self.has_media().then(|| self.turns.clone());
        let mut history = std::mem::take(&mut conversation.history);
        let salt = context.salt(self.cache_salt.as_deref());
        salt_history(&mut history, salt.as_deref());
        let sampling = self.sampling.over(&info.sampling);
        let request = self
            .prompt(conversation)
            .max_new(self.max_new.unwrap_or_else(|| info.texts.max_ctx()))
            .sampling(sampling.clone())
            .stops(self.stop.clone())
            .stop_ids(self.ends.tokens.iter().copied())
            .ignore_eos(self.ends.ignore_eos)
            .grammar(grammar)
            .one_call(!self.several_calls)
            .logprobs(self.logprobs)
            .speculate(if self.prediction.is_some() { Speculate::Auto } else { Speculate::Off })
            .prediction(self.prediction.clone())
            .salt(salt)
            .cancelled_by(ticket.clone());
        let reader =
            Reader::new(info, tools, self.several_calls).reasoning(free).calling(self.must_call());
        let readers = vec![reader; self.choices];
        let work = Work::Generate { requests: vec![request], choices: self.choices, turns };
        let pending = Pending::submit(context, model, history, ticket, work)?;
        Ok(GenerationRequest {
            pending,
            answers: Answers::new(readers, self.choices),
            texts: Arc::clone(&info.texts),
            model: model.name.clone(),
            sampling,
        })
    }
}

impl Context {
    /// Has a model answer a conversation, where it keeps no other request waiting.
    pub(crate) async fn ask(&self, model: Option<String>, ask: Ask) -> Result<GenerationRequest> {
        self.blocking(move |context| {
            let registry = &context.shared.registry;
            let model = registry.able(model.as_deref(), Ability::Generate)?;
            ask.submit(&context, &model)
        })
        .await
    }
}

impl Ends {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self> {
        let tokens = match fields.get("stop_token_ids") {
            Some(value) => tokens(value)
                .filter(|tokens| tokens.len() <= MAX_STOPS)
                .ok_or_else(|| wrong("stop_token_ids", "a list of at most 16 token ids", value))?,
            None => Vec::new(),
        };
        Ok(Self { tokens, ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false) })
    }
}

impl ToolChoice {
    /// OpenAI's `tool_choice`.
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self> {
        let Some(value) = fields.get("tool_choice") else { return Ok(Self::Auto) };
        match value.as_str() {
            Some("auto") => Ok(Self::Auto),
            Some("none") => Ok(Self::None),
            Some("required") => Ok(Self::Required),
            _ => {
                let name = value["function"]["name"].as_str().or(value["name"].as_str());
                let name = name.filter(|_| value["type"] == "function");
                let expected = "auto, none, required or a function";
                name.map(|name| Self::One(name.to_owned()))
                    .ok_or_else(|| wrong("tool_choice", expected, value))
            }
        }
    }
}

/// The tools of a request, as chat templates take them: what is in `function` may stand by itself.
pub(crate) fn tools(fields: &Fields<'_>) -> Result<Vec<Value>> {
    let tools = fields.list("tools")?.into_iter().flatten().enumerate();
    let tool = |(at, tool): (usize, &Value)| {
        let place = format!("tools[{at}]");
        let fields = Fields::of(tool, &place)?;
        let kind = fields.text("type")?.unwrap_or("function");
        if is_foreign(kind) {
            return Ok(None);
        }
        match kind {
            "function" => {}
            "custom" => return custom(&fields).map(Some),
            _ => return Err(fields.wrong("type", "function or custom")),
        }
        if tool.get("function").is_some() {
            return Ok(Some(tool.clone()));
        }
        let mut function = fields.map().clone();
        function.remove("type");
        Ok(Some(json!({"type": "function", "function": function})))
    };
    tools.map(tool).filter_map(Result::transpose).collect()
}

/// Types of tools that a maker's own servers run.
const FOREIGN: [&str; 15] = [
    "apply_patch",
    "bash_",
    "code_execution",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "memory_",
    "namespace",
    "shell",
    "text_editor",
    "tool_search",
    "web_",
];

/// True for a type of tools that a maker's own servers run. They are left out, with a line for the log.
pub(crate) fn is_foreign(kind: &str) -> bool {
    let found = FOREIGN.iter().any(|known| kind.starts_with(known));
    if found {
        tracing::info!("tools of the type {kind:?} are run by another server, and left out");
    }
    found
}

/// The form of an answer: `response_format` of chats, `text.format` of responses.
pub(crate) fn format(format: &Fields<'_>) -> Result<Option<Grammar>> {
    match format.needed("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(Grammar::Json)),
        "json_schema" => {
            let inner = format.object("json_schema")?.unwrap_or_else(|| format.clone());
            let schema = inner.get("schema").ok_or_else(|| inner.missing("schema"))?;
            Ok(Some(Grammar::JsonSchema(schema.clone())))
        }
        _ => Err(format.wrong("type", "text, json_object or json_schema")),
    }
}

/// Sampling options of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Vec<(u32, f32)>,
    seed: Option<u64>,
}

impl Sampling {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self> {
        Ok(Self {
            // Below this, it is greedy.
            temperature: fields
                .number("temperature", 0.0, 2.0)?
                .map(|t| if t < 1e-4 { 0.0 } else { t }),
            top_p: fields.number("top_p", 0.0, 1.0)?.map(|p| p.max(f32::MIN_POSITIVE)),
            top_k: fields.count("top_k", 0, u32::MAX.into())?,
            min_p: fields.number("min_p", 0.0, 1.0)?,
            repetition_penalty: fields.number("repetition_penalty", 0.01, 100.0)?,
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
            logit_bias: logit_bias(fields)?,
            seed: seed(fields)?,
        })
    }

    /// The options, where the request leaves one out that of `model`.
    pub(crate) fn over(&self, model: &SamplingParams) -> SamplingParams {
        model
            .clone()
            .temperature(self.temperature.unwrap_or(model.temperature))
            .top_p(self.top_p.unwrap_or(model.top_p))
            .top_k(self.top_k.unwrap_or(model.top_k))
            .min_p(self.min_p.unwrap_or(model.min_p))
            .repetition_penalty(self.repetition_penalty.unwrap_or(model.repetition_penalty))
            .presence_penalty(self.presence_penalty.unwrap_or(model.presence_penalty))
            .frequency_penalty(self.frequency_penalty.unwrap_or(model.frequency_penalty))
            .logit_bias(self.logit_bias.iter().copied())
            .seed(self.seed.or(model.seed))
    }
}

/// Biases of logits, by the ids of their tokens.
fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let found = biases.map().len();
    if found > MAX_BIASES {
        let message = format!("expected at most {MAX_BIASES} tokens, found {found}");
        return Err(ApiError::bad("logit_bias", message).code("invalid_value"));
    }
    let bias = |(token, _): (&String, &Value)| {
        let id = token.parse::<u32>().map_err(|_| {
            let message = format!("expected ids of tokens as names, found {token:?}");
            ApiError::bad("logit_bias", message).code("invalid_value")
        })?;
        Ok((id, biases.number(token, -100.0, 100.0)?.unwrap_or(0.0)))
    };
    biases.map().iter().map(bias).collect()
}

/// A seed is any whole number of 64 bits.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| wrong("seed", "a whole number", value))
}

/// OpenAI's `prediction`: a text, or parts of one.
fn prediction(fields: &Fields<'_>) -> Result<Option<String>> {
    let Some(prediction) = fields.object("prediction")? else { return Ok(None) };
    if prediction.needed("type")? != "content" {
        return Err(prediction.wrong("type", "content"));
    }
    let parts = parts(prediction.get("content"), &prediction.path("content"))?;
    Ok(Some(Turn { parts, ..Turn::default() }.texts()))
}

/// Salt that sets the states of a request apart from those of others.
pub(crate) fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>> {
    let salt = fields.text("cache_salt")?;
    if salt.is_some_and(str::is_empty) {
        let message = "expected a text that nobody else knows, found an empty one";
        return Err(ApiError::bad("cache_salt", message).code("invalid_value"));
    }
    Ok(salt.map(str::to_owned))
}

/// Tells conversations of one salt apart from those of another, so that no session is taken for the other's.
fn salt_history(history: &mut [u64], salt: Option<&str>) {
    let Some(salt) = salt else { return };
    let mut hasher = DefaultHasher::new();
    salt.hash(&mut hasher);
    history.iter_mut().for_each(|message| *message ^= hasher.finish());
}

/// Texts that end the answer.
pub(crate) fn stops(fields: &Fields<'_>, name: &str) -> Result<Vec<String>> {
    let stops = fields.texts(name)?;
    if stops.len() > MAX_STOPS {
        let message = format!("expected at most {MAX_STOPS} texts, found {}", stops.len());
        return Err(ApiError::bad(name, message).code("invalid_value"));
    }
    Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
}

/// Variables of the chat template that a client gives: whether to think, and the others. What the server sets itself is
/// not the client's to give.
fn template_arguments(kwargs: Fields<'_>) -> Result<(Option<bool>, Map<String, Value>)> {
    let thinking = kwargs.flag("enable_thinking")?;
    let mut arguments = kwargs.map().clone();
    arguments.remove("enable_thinking");
    for name in ["messages", "tools", "documents", "add_generation_prompt"] {
        if arguments.contains_key(name) {
            let message = "the server sets it";
            return Err(ApiError::bad(kwargs.path(name), message).code("invalid_value"));
        }
    }
    Ok((thinking, arguments))
}
