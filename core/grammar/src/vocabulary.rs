//! The tokens of a tokenizer as bytes.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{
    InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};
use llguidance::{Matcher, ParserFactory, TokenParser};
use qhx_base::{Error, ErrorKind, Result, error};
use qhx_text::{CallFormat, CallSyntax, Tokenizer};
use serde_json::Value;

use crate::constraint::{Constraint, short};
use crate::faults::{locate, plain};
use crate::schema::flexible;
use crate::{AnswerForm, Grammar};

/// A longer token never matches: none in use is, and the tree of tokens is as deep as the longest.
const MAX_TOKEN: usize = 512;

/// A text before another one, so that the other does not begin a text. No vocabulary joins it with what follows.
const BEFORE: &str = "\u{2}";

/// A tree of all tokens by their bytes. It takes some seconds to make for 250,000 tokens; clones share it, also
/// between threads.
#[derive(Clone)]
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
    tokenizer: Tokenizer,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The tokens below `count` for which `allowed` holds. `ends`: those that end an answer.
    ///
    /// # Errors
    /// When tokens have no bytes of their own, see [`Tokenizer::token_bytes`].
    pub fn new(
        tokenizer: &Tokenizer,
        count: usize,
        allowed: impl Fn(u32) -> bool,
        ends: &[u32],
    ) -> Result<Self> {
        let bytes = tokenizer.token_bytes()?;
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let word = |id: u32| -> Result<Vec<u8>> {
            if !allowed(id) {
                return Ok(Vec::new());
            }
            let mut word = bytes.of(id)?;
            if word.is_empty()
                && tokenizer.visible_token(id).is_none()
                && let Some(name) = tokenizer.id_to_token(id)
            {
                word = [&[marker], name.as_bytes()].concat();
            } else if word.first() == Some(&marker) {
                // No byte of UTF-8.
                word.clear();
            }
            if word.len() > MAX_TOKEN {
                word.clear();
            }
            Ok(word)
        };
        let ids = 0..u32::try_from(count).unwrap_or(u32::MAX);
        let mut words: Vec<_> = ids.map(word).collect::<Result<_>>()?;
        let mut ends: Vec<_> =
            ends.iter().copied().filter(|&id| (id as usize) < words.len()).collect();
        if ends.is_empty() {
            // One is expected: a token that there is not.
            ends.push(words.len() as u32);
            words.push(Vec::new());
        }
        let factory = guarded(|| {
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, ends[0]), &words);
            let trie = trie.with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(Env { trie, tokenizer: tokenizer.clone() });
            let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
            factory.quiet().limits_mut().verbose_errors = false;
            Ok::<_, String>(factory)
        });
        let factory =
            factory.map_err(|why| error!(Artifact, "{}: {why}", tokenizer.path().display()))?;
        Ok(Self { factory: Arc::new(factory), tokenizer: tokenizer.clone() })
    }

    /// Constraint of a grammar, at the beginning of an answer. `form` is how the model writes answers. `stops` are
    /// further tokens that may end the answer. With `goes_on`, none of the model's own ends it before the grammar does.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] when the grammar is invalid, too big, or no text is of it.
    pub fn constrain(
        &self,
        grammar: &Grammar,
        form: AnswerForm,
        stops: &[u32],
        goes_on: bool,
    ) -> Result<Constraint> {
        let special = |name: &str| {
            let id = self.tokenizer.token_to_id(name)?;
            self.tokenizer.visible_token(id).is_none().then(|| format!("<[{id}]>"))
        };
        let compiled = grammar.compile(form, special)?;
        let parser = self.strict(grammar, form.calls).and_then(|()| self.parser(compiled));
        let parser = parser.map_err(|why| {
            let message = self.fault(grammar, &why, |tool| {
                self.parser(tool.compile(form, special).map_err(|e| e.to_string())?).map(drop)
            });
            Error::new(ErrorKind::Usage, message)
        })?;
        let trie = self.factory.tok_env().tok_trie();
        let goes_on = if goes_on { trie.eos_tokens().to_vec() } else { Vec::new() };
        let mut constraint =
            Constraint::new(Matcher::new(Ok(parser)), stops.to_vec(), goes_on, trie.vocab_size());
        // What no text is of has no first token.
        constraint.mask().map_err(|e| e.context(grammar.name()))?;
        Ok(constraint)
    }

    /// Refuses a strict tool with what no grammar can hold to, where the format has no schema of all arguments.
    fn strict(&self, grammar: &Grammar, format: Option<CallFormat>) -> Result<(), String> {
        let pairs = format.is_some_and(|f| matches!(f.syntax().call, CallSyntax::Pairs { .. }));
        let tools = grammar.tools().unwrap_or_default().iter();
        for tool in tools.filter(|tool| pairs && tool.strict) {
            self.parser(TopLevelGrammar::from_json_schema(flexible(tool.parameters.clone())))?;
        }
        Ok(())
    }

    fn parser(&self, compiled: TopLevelGrammar) -> Result<TokenParser, String> {
        let caps = InferenceCapabilities { ff_tokens: true, ..Default::default() };
        guarded(|| {
            let logger = llguidance::Logger::new(0, 0);
            let limits = self.factory.limits().clone();
            let init = llguidance::api::GrammarInit::Serialized(compiled);
            self.factory.create_parser_from_init_ext(init, logger, caps, limits)
        })
    }

    /// The message about a grammar that is not compiled because of `why`: what is at fault in the words of whoever
    /// wrote it. `compile` compiles the grammar of one tool.
    fn fault(
        &self,
        grammar: &Grammar,
        why: &str,
        compile: impl Fn(&Grammar) -> Result<(), String>,
    ) -> String {
        let schema = |part: &Value| {
            self.parser(TopLevelGrammar::from_json_schema(flexible(part.clone()))).map(drop)
        };
        let name = grammar.name();
        let tools = match grammar {
            Grammar::JsonSchema(whole) => return locate(whole, why, schema).of(name),
            Grammar::Calls(tools) | Grammar::OptionalCalls(tools) => tools,
            _ => return format!("{name}: {}", short(&why)),
        };
        for tool in tools {
            let place = format!("{name}: the parameters of {:?}", tool.name);
            let parameters = &tool.parameters;
            if let Err(why) = schema(parameters) {
                return locate(parameters, &why, schema).of(&place);
            }
            if let Err(why) = compile(&Grammar::Calls(vec![tool.clone()])) {
                return format!("{place}: {}", plain(&why));
            }
        }
        format!("{name}: {}", plain(why))
    }
}

/// Runs a call into `llguidance`, which panics on some input.
fn guarded<T, E: fmt::Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("it cannot be compiled".to_owned()),
    }
}

struct Env {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl Env {
    /// The tokens of a text amid others, as the model was trained to write it; `None` where they spell another text.
    fn canonical(&self, text: &str) -> Option<Vec<TokenId>> {
        let spells = |tokens: &[TokenId]| {
            let mut rest = text.as_bytes();
            tokens.iter().all(|&token| {
                let word = if (token as usize) < self.trie.vocab_size() {
                    self.trie.token(token)
                } else {
                    &[]
                };
                let within = rest.strip_prefix(word).filter(|_| !word.is_empty());
                rest = within.unwrap_or(rest);
                within.is_some()
            }) && rest.is_empty()
        };
        let tokens = self.tokenizer.encode(text, false).ok()?;
        if spells(&tokens) {
            return Some(tokens);
        }
        // What is put before a text, such as a space, is behind this.
        let before = self.tokenizer.encode(BEFORE, false).ok()?;
        let tokens = self.tokenizer.encode(&format!("{BEFORE}{text}"), false).ok()?;
        let tokens = tokens.strip_prefix(before.as_slice())?;
        spells(tokens).then(|| tokens.to_vec())
    }
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        text.and_then(|text| self.canonical(text))
            .unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
