//! `/v1/completions`.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use qhx::{Infill, Prompt, TextPipeline, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Delta, Step};
use crate::chat::{Head, bytes_of, finite, include_usage, usage};
use crate::error::{ApiError, Result, json_response};
use crate::fields::{Fields, tokens, wrong};
use crate::generation_request::{
    Ends, GenerationRequest, Sampling, UNSUPPORTED, cache_salt, stops,
};
use crate::pending::Pending;
use crate::queue::Work;
use crate::registry::Ability;
use crate::request::{Asked, Context};
use crate::sse::{self, Events, Writer};

/// Fields that are refused.
pub(crate) const REFUSED: [&str; 1] = ["response_format"];

/// Prompts of one request.
const MAX_PROMPTS: usize = 1024;

/// A request for completions.
pub(crate) struct Completion {
    prompts: Vec<Prompt>,
    request: qhx::Request,
    sampling: Sampling,
    /// Text behind the answers, which fill in what is before it.
    suffix: Option<String>,
    choices: usize,
    echo: bool,
    logprobs: Option<usize>,
    cache_salt: Option<String>,
}

pub(crate) async fn complete(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = fields.text("model")?.map(str::to_owned);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = include_usage(&fields)?;
    let completion = context.memory.work(|| Completion::read(&fields))?;
    let (echo, logprobs, each) = (completion.echo, completion.logprobs, completion.choices);
    if stream && echo && logprobs.is_some() {
        let message = "with echo and logprobs there is no stream";
        return Err(ApiError::bad("stream", message).code("invalid_value"));
    }
    let submit = move |context: Context| completion.submit(&context, model.as_deref());
    let (mut asked, prompts) = context.blocking(submit).await?;
    let head = Head::new("cmpl-", &asked.model);
    if stream {
        let texts = Arc::clone(&asked.texts);
        let has_logprobs = logprobs.is_some();
        let writer = CompletionWriter {
            head,
            texts,
            prompts,
            each,
            include_usage,
            has_logprobs,
            logprobs: Vec::new(),
            offset: 0,
        };
        return sse::stream(&context, asked, writer).await;
    }
    asked.answers.collect(asked.pending, &context.tally).await?;
    let answers = asked.answers.answers.iter().enumerate();
    let choice = |(index, answer): (usize, &Answer)| {
        let prompt = prompts.get(index / each).map_or("", String::as_str);
        let logprobs = logprobs.map(|_| listed(answer, &asked.texts));
        json!({
            "index": index,
            "text": format!("{prompt}{}", answer.text),
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason(),
        })
    };
    let choices: Vec<_> = answers.map(choice).collect();
    let mut json = head.json("text_completion");
    json["choices"] = choices.into();
    json["usage"] = usage(&asked.answers.usage);
    Ok(json_response(StatusCode::OK, &json))
}

impl Completion {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self> {
        fields.unsupported(&UNSUPPORTED)?;
        fields.unsupported(&REFUSED)?;
        let ends = Ends::read(fields)?;
        let prompts = prompts(fields.get("prompt").ok_or_else(|| fields.missing("prompt"))?)?;
        let choices = fields.count("n", 1, 16)?.unwrap_or(1);
        let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
        if fields.count("best_of", 1, 20)?.is_some_and(|best| best > choices) {
            let message = "expected at most n: choices are not weighed";
            return Err(ApiError::bad("best_of", message).code("unsupported"));
        }
        let echo = fields.flag("echo")?.unwrap_or(false);
        if suffix.is_some() && (echo || prompts.iter().any(|p| !matches!(p, Prompt::Text(_)))) {
            let message = "expected prompts that are texts, without echo";
            return Err(ApiError::bad("suffix", message).code("unsupported"));
        }
        let logprobs = fields.count("logprobs", 0, 20)?;
        let request = qhx::Request::completion("")
            .max_new(fields.count("max_tokens", 0, u32::MAX.into())?.unwrap_or(16))
            .stops(stops(fields, "stop")?)
            .stop_ids(ends.tokens)
            .ignore_eos(ends.ignore_eos)
            .logprobs(logprobs)
            .prompt_logprobs(logprobs.filter(|_| echo));
        let sampling = Sampling::read(fields)?;
        let cache_salt = cache_salt(fields)?;
        let suffix = suffix.map(str::to_owned);
        Ok(Self { prompts, request, suffix, sampling, choices, echo, logprobs, cache_salt })
    }

    /// The same for a text in front of one that may be empty.
    pub(crate) fn read_infill(fields: &Fields<'_>) -> Result<Self> {
        let suffix = fields.text("suffix")?.unwrap_or_default().to_owned();
        Ok(Self { suffix: Some(suffix), ..Self::read(fields)? })
    }

    /// Has a model complete the prompts. Returns their texts, too, where they are part of the answers.
    pub(crate) fn submit(
        self,
        context: &Context,
        model: Option<&str>,
    ) -> Result<(GenerationRequest, Vec<String>)> {
        let model = &context.shared.registry.able(model, Ability::Generate)?;
        let of_model = |e: qhx::Error| ApiError::of_model(&e, &model.name);
        let info = context.info(model)?;
        let ticket = context.ticket();
        let sampling = self.sampling.over(&info.sampling);
        let salt = context.salt(self.cache_salt.as_deref());
        let request =
            self.request.sampling(sampling.clone()).salt(salt).cancelled_by(ticket.clone());
        let (mut requests, mut texts) = (Vec::new(), Vec::new());
        for prompt in self.prompts {
            if self.echo {
                let text = match &prompt {
                    Prompt::Tokens(tokens) => info.texts.decode(tokens).map_err(of_model)?,
                    Prompt::Text(text) => text.clone(),
                    _ => String::new(),
                };
                texts.push(text);
            }
            let mut request = request.clone();
            let prompt = match (prompt, &self.suffix) {
                (Prompt::Text(before), Some(behind)) => {
                    let found = info.texts.infill(&before, behind);
                    let Infill { tokens, ends } = found
                        .map_err(|e| ApiError::bad("suffix", e.message()).code("unsupported"))?;
                    request.stop_ids.extend(ends);
                    Prompt::Tokens(tokens)
                }
                (prompt, _) => prompt,
            };
            requests.push(request.prompt(prompt));
        }
        let answers = Answers::plain(&info, requests.len() * self.choices, self.choices);
        let work = Work::Generate { requests, choices: self.choices, turns: None };
        let pending = Pending::submit(context, model, Vec::new(), ticket, work)?;
        let asked = GenerationRequest {
            pending,
            answers,
            texts: Arc::clone(&info.texts),
            model: model.name.clone(),
            sampling,
        };
        Ok((asked, texts))
    }
}

/// A text, texts, tokens, or lists of tokens.
fn prompts(value: &Value) -> Result<Vec<Prompt>> {
    let expected = "a string, a list of strings, a list of token ids, or a list of such lists";
    let bad = || wrong("prompt", expected, value);
    let prompts: Option<Vec<Prompt>> = match value {
        Value::String(text) => Some(vec![Prompt::Text(text.clone())]),
        Value::Array(list) if list.first().is_some_and(Value::is_u64) => {
            Some(vec![Prompt::Tokens(tokens(value).ok_or_else(bad)?)])
        }
        Value::Array(list) => {
            let prompt = |value: &Value| match value {
                Value::String(text) => Some(Prompt::Text(text.clone())),
                value => tokens(value).map(Prompt::Tokens),
            };
            list.iter().map(prompt).collect()
        }
        _ => None,
    };
    let prompts = prompts.filter(|prompts| !prompts.is_empty()).ok_or_else(bad)?;
    if prompts.len() > MAX_PROMPTS {
        let message = format!("expected at most {MAX_PROMPTS}, found {}", prompts.len());
        return Err(ApiError::bad("prompt", message).code("invalid_value"));
    }
    Ok(prompts)
}

/// Log-probabilities of an answer, those of the prompt before them, in the lists of this interface.
fn listed(answer: &Answer, texts: &TextPipeline) -> Value {
    let prompt = answer.prompt.iter().map(|token| (token.id, token.logprobs.as_ref()));
    let answer = answer.logprobs.iter().map(|(id, logprobs)| (*id, Some(logprobs)));
    lists(prompt.chain(answer), texts, &mut 0)
}

/// `offset` is the number of characters before them.
fn lists<'a>(
    tokens: impl Iterator<Item = (u32, Option<&'a TokenLogprobs>)>,
    texts: &TextPipeline,
    offset: &mut usize,
) -> Value {
    let (mut names, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for (id, logprobs) in tokens {
        let name = name(id, texts);
        offsets.push(*offset);
        *offset += name.chars().count();
        own.push(logprobs.map(|logprobs| finite(logprobs.logprob)));
        tops.push(logprobs.map(|logprobs| {
            let mut top = Map::new();
            top.insert(name.clone(), finite(logprobs.logprob).into());
            for (id, logprob) in &logprobs.top {
                top.insert(self::name(*id, texts), finite(*logprob).into());
            }
            top
        }));
        names.push(name);
    }
    json!({
        "tokens": names,
        "token_logprobs": own,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

fn name(id: u32, texts: &TextPipeline) -> String {
    String::from_utf8_lossy(&bytes_of(id, texts)).into_owned()
}

/// Writes chunks.
struct CompletionWriter {
    head: Head,
    texts: Arc<TextPipeline>,
    /// Texts of the prompts, where they are part of the answers.
    prompts: Vec<String>,
    /// Choices of each prompt.
    each: usize,
    include_usage: bool,
    has_logprobs: bool,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<(u32, TokenLogprobs)>,
    offset: usize,
}

impl CompletionWriter {
    fn chunk(&mut self, index: usize, text: &str, finish: Option<&str>) -> Value {
        let tokens = std::mem::take(&mut self.logprobs);
        let tokens = tokens.iter().map(|(id, logprobs)| (*id, Some(logprobs)));
        let lists = self.has_logprobs.then(|| lists(tokens, &self.texts, &mut self.offset));
        let mut chunk = self.head.json("text_completion");
        chunk["choices"] =
            json!([{"index": index, "text": text, "logprobs": lists, "finish_reason": finish}]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, _: &mut Events) {}

    fn step(&mut self, step: &Step, answers: &Answers, events: &mut Events) {
        let echoed = self.prompts.get(step.choice / self.each).filter(|_| step.prefilled).cloned();
        if let Some(prompt) = echoed {
            let chunk = self.chunk(step.choice, &prompt, None);
            events.data(&chunk);
        }
        self.logprobs.extend(step.logprobs.clone());
        for delta in &step.deltas {
            if let Delta::Text(text) = delta {
                let chunk = self.chunk(step.choice, text, None);
                events.data(&chunk);
            }
        }
        if step.finished.is_some() {
            let finish = answers.answers.get(step.choice).and_then(Answer::finish_reason);
            let chunk = self.chunk(step.choice, "", finish);
            events.data(&chunk);
            self.offset = 0;
        }
    }

    fn end(&mut self, answers: &Answers, events: &mut Events) {
        if self.include_usage {
            let mut chunk = self.head.json("text_completion");
            (chunk["choices"], chunk["usage"]) = (json!([]), usage(&answers.usage));
            events.data(&chunk);
        }
        events.text("data: [DONE]\n\n");
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.json());
        events.text("data: [DONE]\n\n");
    }
}
