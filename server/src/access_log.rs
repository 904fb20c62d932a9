//! A line a request.

use std::fmt;
use std::time::Duration;

use qhx_base::escape::shown;

/// A request that is over.
///
/// Its text is one line for a log. Of what the client sent it has its id and its model, escaped, and the prompt only
/// where [`ServerOptions::log_prompts`](crate::ServerOptions::log_prompts) asks for that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The id, which the response has in `x-request-id`.
    pub id: String,
    /// The method and the route, such as `POST /v1/chat/completions`.
    pub route: String,
    /// The status of the response; 499 where the client left before.
    pub status: u16,
    /// The model that was asked for.
    pub model: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose state was there already.
    pub cached_tokens: usize,
    /// Tokens of the answer.
    pub completion_tokens: usize,
    /// From the request's head to the end of the response.
    pub time: Duration,
    /// Code and message of an error, without texts of the request.
    pub error: Option<String>,
    /// Text of the request.
    pub prompt: Option<String>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, route, status, .. } = self;
        write!(f, "{id} {route} {status}")?;
        if let Some(model) = &self.model {
            write!(f, " \"{}\"", shown(model))?;
        }
        let Self { prompt_tokens, cached_tokens, completion_tokens, .. } = self;
        if *prompt_tokens > 0 {
            write!(f, " {prompt_tokens}+{completion_tokens} tokens ({cached_tokens} cached)")?;
        }
        write!(f, " {} ms", self.time.as_millis())?;
        if let Some(error) = &self.error {
            write!(f, " {}", shown(error))?;
        }
        match &self.prompt {
            Some(prompt) => write!(f, " {}", shown(prompt)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line_whatever_the_client_sent() {
        let record = Record {
            id: "req_1".to_owned(),
            route: "POST /v1/completions".to_owned(),
            status: 404,
            model: Some("a\n200 \u{1b}[2J".to_owned()),
            error: Some("bad: \na".to_owned()),
            prompt: Some("one\r\ntwo".to_owned()),
            ..Record::default()
        };
        let line = record.to_string();
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
        assert!(line.starts_with("req_1 POST /v1/completions 404 "), "{line}");
    }
}
