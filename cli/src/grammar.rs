//! Grammar of an answer, and the tools that it may call.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use qhx_base::{Error, ErrorKind, Result, files};
use qhx_core::engine::{Generation, Grammar, Model, Request};
use qhx_text::Tool;
use serde_json::{Value, json};

/// What an answer may be.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Structured output")]
pub(crate) struct GrammarArgs {
    /// Answer with JSON of the schema in this file, written without spaces
    #[arg(long, value_name = "FILE", conflicts_with_all = ["grammar", "choice"])]
    pub json_schema: Option<PathBuf>,
    /// Answer with a text of the grammar in this file, which is in the Lark syntax of llguidance
    #[arg(long, value_name = "FILE", conflicts_with = "choice")]
    pub grammar: Option<PathBuf>,
    /// Answer with one of these texts
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub choice: Vec<String>,
    /// Give the chat template the tools in this file, a JSON list as servers take it. With --json, the calls in an
    /// answer come as tool_calls
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// Whether an answer has to be calls of tools
    #[arg(long, value_enum, value_name = "auto|required", default_value = "auto", requires = "tools",
          conflicts_with_all = ["json_schema", "grammar", "choice"])]
    pub tool_choice: ToolChoice,
}

/// Whether an answer has to be calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ToolChoice {
    /// As the model likes
    Auto,
    /// It is calls, and nothing else
    Required,
}

/// The tools of a conversation.
#[derive(Debug)]
pub(crate) struct Tools(Vec<Tool>);

impl GrammarArgs {
    /// Reads the files, and asks a request for what they say.
    ///
    /// # Errors
    ///
    /// A file is not there, or not what it is to be.
    pub(crate) fn apply(&self, mut request: Request) -> Result<(Request, Option<Tools>)> {
        let grammar = if let Some(file) = &self.json_schema {
            Some(Grammar::json_schema(&read(file)?).map_err(|e| e.context(file.display()))?)
        } else if let Some(file) = &self.grammar {
            Some(Grammar::Lark(read(file)?))
        } else if !self.choice.is_empty() {
            Some(Grammar::Choice(self.choice.clone()))
        } else {
            None
        };
        request = request.grammar(grammar);
        let Some(file) = &self.tools else { return Ok((request, None)) };
        let list: Value = serde_json::from_str(&read(file)?).map_err(|e| {
            Error::caused(ErrorKind::Usage, format_args!("{}: no JSON", file.display()), e)
        })?;
        let tools = Tool::list(&list).map_err(|e| e.context(file.display()))?;
        request = request.template_argument("tools", list);
        if self.tool_choice == ToolChoice::Required {
            request = request.grammar(Grammar::Calls(tools.clone()));
        }
        Ok((request, Some(Tools(tools))))
    }
}

fn read(file: &Path) -> Result<String> {
    files::read_text(ErrorKind::Usage, file, Grammar::MAX_BYTES as u64)
}

impl Tools {
    /// Errors where the model's calls could not be read.
    pub(crate) fn check(&self, model: &Model) -> Result<()> {
        match model.texts().call_format() {
            Some(_) => Ok(()),
            None => Err(Error::new(
                ErrorKind::Usage,
                "option --tools: the bundle has no chat template in Jinja, and its markers know no tools",
            )
            .hint("describe the tools in the message, and ask for the call with --json-schema")),
        }
    }

    /// Adds the calls in an answer to what is printed of it.
    pub(crate) fn report(
        &self,
        model: &Model,
        generation: &Generation,
        out: &mut Value,
    ) -> Result<()> {
        out["tool_calls"] = json!(model.texts().calls(&generation.tokens, &self.0)?);
        Ok(())
    }
}
