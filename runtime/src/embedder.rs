//! Texts and images to vectors, with the prefixes that a bundle declares.

use std::collections::BTreeMap;
use std::sync::Arc;

use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Error, ErrorKind, Result, TooLong, error, names, setters};
use qhx_core::engine::{Model, TextAndTokens};
use qhx_core::op::{ImageRules, Modality};
use qhx_media::{Limits, Source, decode_image};
use qhx_text::Tokenizer;
use qhx_types::Media;

/// Treatment of a text that is too long.
const SPLIT: &str = "split the text, or cut it with --truncate";

/// Role of a text, which decides its prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Is searched for with.
    Query,
    /// Is found.
    #[default]
    Document,
}

names! { Role: Query = "query", Document = "document" }

/// Options for tokenizing texts before they are embedded.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EmbedOptions {
    /// Put before queries; the manifest's `params.query_prefix` if it is `None`.
    pub query_prefix: Option<String>,
    /// Put before documents; the manifest's `params.document_prefix` if it is `None`.
    pub document_prefix: Option<String>,
    /// Truncate texts that are too long, instead of refusing them.
    pub truncate: bool,
}

impl EmbedOptions {
    setters! {
        /// Put before queries, instead of the manifest's `params.query_prefix`.
        query_prefix(query_prefix: impl Into<Option<String>>) => query_prefix = query_prefix.into(),
        /// Put before documents, instead of the manifest's `params.document_prefix`.
        document_prefix(document_prefix: impl Into<Option<String>>) => document_prefix = document_prefix.into(),
        /// True to truncate texts that are too long instead of refusing them.
        truncate: bool,
    }
}

/// Tokenizer and prefixes of an encoder. A clone can tokenize on another thread while the model works.
#[derive(Debug, Clone)]
pub struct Prefixed {
    tokenizer: Tokenizer,
    query: String,
    document: String,
    truncate: bool,
    /// Maximum number of tokens that the encoder takes.
    max_tokens: usize,
    /// Rules for turning images into pixels, if the encoder takes images.
    images: Option<ImageRules>,
    cancel: CancelToken,
    trace: Option<Arc<Trace>>,
}

impl Prefixed {
    fn new(model: &Model, options: EmbedOptions) -> Result<Self> {
        let Some(tokenizer) = model.tokenizer() else {
            return Err(error!(
                Prompt,
                "{}: the bundle has no tokenizer, so a text cannot become tokens",
                model.manifest().path.display()
            )
            .hint("name tokenizer.json in artifacts.tokenizer"));
        };
        let declared = |key: &str| {
            let value = model.manifest().params.rest.get(key).and_then(|v| v.as_str());
            value.unwrap_or_default().to_owned()
        };
        Ok(Self {
            tokenizer: tokenizer.clone(),
            query: options.query_prefix.unwrap_or_else(|| declared("query_prefix")),
            document: options.document_prefix.unwrap_or_else(|| declared("document_prefix")),
            truncate: options.truncate,
            max_tokens: model.info().max_ctx,
            images: takes_images(model).then(|| model.media_rules().image),
            cancel: model.cancel_token().clone(),
            trace: model.trace().cloned(),
        })
    }

    /// Prefix for texts with this role.
    pub fn prefix(&self, role: Role) -> &str {
        match role {
            Role::Query => &self.query,
            Role::Document => &self.document,
        }
    }

    /// True if texts that are too long are truncated.
    pub fn truncates(&self) -> bool {
        self.truncate
    }

    setters! {
        /// The same, with texts that are too long truncated or refused.
        truncating(truncate: bool) => truncate = truncate,
    }

    /// The tokens of a text behind its prefix, at most as many as the encoder takes.
    ///
    /// # Errors
    /// When the text has more tokens and is not to be truncated, or is cancelled.
    pub fn tokens(&self, text: &str, role: Role) -> Result<Vec<u32>> {
        let _span = trace::span(self.trace.as_ref(), "tokenize");
        let text = [self.prefix(role), text].concat();
        if self.truncate {
            return self.tokenizer.encode_truncated(&text, self.max_tokens, &self.cancel);
        }
        let tokens = self.tokenizer.encode_within(&text, true, self.max_tokens, &self.cancel);
        self.fitting(tokens.map_err(|e| match e.kind() {
            ErrorKind::Prompt => e.hint(SPLIT),
            _ => e,
        })?)
    }

    /// Tokens that are given, at most as many as the encoder takes.
    ///
    /// # Errors
    /// When there are more, and they are not to be truncated.
    pub fn fitting(&self, mut tokens: Vec<u32>) -> Result<Vec<u32>> {
        let (found, max) = (tokens.len(), self.max_tokens);
        if found > max && !self.truncate {
            let error = error!(Prompt, "{found} tokens, the encoder takes at most {max}");
            return Err(error.with_source(TooLong { max }).hint(SPLIT));
        }
        tokens.truncate(max);
        Ok(tokens)
    }
}

impl Prefixed {
    /// The pixels of an image, given by its file or as a `data:` URL.
    ///
    /// # Errors
    /// When the encoder takes no images, or the file is none that can be decoded.
    pub fn image(&self, file: &str) -> Result<Media> {
        let limits = Limits::default();
        self.pixels(&Source::parse(file, &limits)?, &limits)
    }

    /// Same as [`Prefixed::image`], for a file or bytes.
    ///
    /// # Errors
    /// Errors of [`Prefixed::image`].
    pub fn pixels(&self, source: &Source, limits: &Limits) -> Result<Media> {
        let _span = trace::span(self.trace.as_ref(), "decode");
        let Some(rules) = &self.images else {
            return Err(error!(Prompt, "{source}: the bundle takes no images")
                .hint("make one of a model with towers for texts and images, such as SigLIP 2"));
        };
        decode_image(source, rules, limits)?.into_media()
    }
}

fn takes_images(model: &Model) -> bool {
    model.op().description.modalities.contains(&Modality::Image)
}

/// A model that embeds texts, and images where it has a tower for them: prefixes, truncation and packing are those of
/// `qhx embed`.
///
/// ```no_run
/// let mut embedder = qhx::Bundle::open("embedcode/v81")?.embedder()?;
/// let vectors = embedder.embed_many(&["def fib(n): …", "SELECT 1"])?;
/// assert_eq!(vectors.len(), 2);
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Embedder {
    model: Model,
    texts: Prefixed,
}

impl Embedder {
    /// Wraps an open model, with the prefixes of its manifest.
    ///
    /// # Errors
    /// When the model does not embed, or has no tokenizer.
    pub fn new(model: Model) -> Result<Self> {
        Self::with_options(model, EmbedOptions::default())
    }

    /// Same as [`Embedder::new`], with options.
    ///
    /// # Errors
    /// Errors of [`Embedder::new`].
    pub fn with_options(model: Model, options: EmbedOptions) -> Result<Self> {
        if model.info().embedding_dim == 0 {
            return Err(no_embedder(&model));
        }
        let texts = Prefixed::new(&model, options)?;
        Ok(Self { model, texts })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, to cancel its work with [`Model::cancellable`], say.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Tokenizer and prefixes for texts.
    pub fn texts(&self) -> &Prefixed {
        &self.texts
    }

    /// Values of a vector.
    pub fn dimensions(&self) -> usize {
        self.model.info().embedding_dim
    }

    /// The vector of a text, normalized as the bundle declares.
    ///
    /// # Errors
    /// When the text does not fit the encoder, or the vector is zero or not finite.
    pub fn embed(&mut self, text: &str, role: Role) -> Result<&[f32]> {
        let tokens = self.texts.tokens(text, role)?;
        self.model.embed(&tokens)
    }

    /// The vector of a text with weights and vectors of its tokens, by a model that has such.
    ///
    /// ```no_run
    /// use qhx::Role;
    ///
    /// let mut embedder = qhx::Bundle::open("bge-m3/v81")?.embedder()?;
    /// let query = embedder.embed_tokens("What is BGE M3?", Role::Query)?;
    /// let document = embedder.embed_tokens("BGE M3 is an embedding model.", Role::Document)?;
    /// println!("{:?} {:?}", query.lexical_score(&document), query.late_score(&document));
    /// # Ok::<(), qhx::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`Embedder::embed`], and when the bundle has neither.
    pub fn embed_tokens(&mut self, text: &str, role: Role) -> Result<TokenVectors> {
        let tokens = self.texts.tokens(text, role)?;
        self.embed_tokenized(&tokens)
    }

    /// Same as [`Embedder::embed_tokens`], for a text that is tokens.
    ///
    /// # Errors
    /// Errors of [`Embedder::embed_tokens`].
    pub fn embed_tokenized(&mut self, tokens: &[u32]) -> Result<TokenVectors> {
        let TextAndTokens { vector, weights, rows } = self.model.embed_tokens(tokens)?;
        let special = |id: u32| self.texts.tokenizer.visible_token(id).is_none();
        let sparse = weights.map(|weights| {
            let mut sparse = BTreeMap::new();
            for (&id, weight) in tokens.iter().zip(weights) {
                if weight > 0.0 && !special(id) {
                    let largest: &mut f32 = sparse.entry(id).or_default();
                    *largest = largest.max(weight);
                }
            }
            sparse
        });
        Ok(TokenVectors { vector, sparse, multi: rows })
    }

    /// The vector of an image, given by its file or as a `data:` URL, in the space of the texts' vectors.
    ///
    /// ```no_run
    /// use qhx::{Role, cosine};
    ///
    /// let mut embedder = qhx::Bundle::open("siglip2/v81")?.embedder()?;
    /// let image = embedder.embed_image("boat.jpg")?.to_vec();
    /// println!("{:.3}", cosine(&image, embedder.embed("a boat", Role::Query)?));
    /// # Ok::<(), qhx::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the model takes no images, the file cannot be decoded, or the vector is zero or not finite.
    pub fn embed_image(&mut self, file: &str) -> Result<&[f32]> {
        let image = self.texts.image(file)?;
        self.model.embed_media(&image)
    }

    /// Same as [`Embedder::embed_image`], for pixels.
    ///
    /// # Errors
    /// Errors of [`Embedder::embed_image`].
    pub fn embed_media(&mut self, image: &Media) -> Result<&[f32]> {
        self.model.embed_media(image)
    }

    /// The vectors of documents, in their order. Short texts share graphs where the model has such.
    ///
    /// # Errors
    /// Errors of [`Embedder::embed`]; the error names the text by its index.
    pub fn embed_many<T: AsRef<str>>(&mut self, texts: &[T]) -> Result<Vec<Vec<f32>>> {
        let tokens = |(index, text): (usize, &T)| {
            let tokens = self.texts.tokens(text.as_ref(), Role::Document);
            tokens.map_err(|e| e.context(format_args!("text {index}")))
        };
        let tokens = texts.iter().enumerate().map(tokens).collect::<Result<Vec<_>>>()?;
        self.model.embed_many(&tokens)
    }

    /// The vectors of texts that are tokens: see [`Model::embed_each`].
    ///
    /// # Errors
    /// Errors of [`Model::embed_each`].
    pub fn embed_each(
        &mut self,
        tokens: &[Vec<u32>],
        done: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.model.embed_each(tokens, done)
    }
}

/// Vectors of a text as BGE-M3 has them: one of the whole text, weights of its tokens, and a vector for each of them.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenVectors {
    /// The vector of the text.
    pub vector: Vec<f32>,
    /// The weights of tokens by their ids, those above 0; of a token that occurs several times the largest. Special
    /// tokens have none.
    pub sparse: Option<BTreeMap<u32, f32>>,
    /// A vector for each token behind the first, which opens every text; of length 1.
    pub multi: Option<Vec<Vec<f32>>>,
}

impl TokenVectors {
    /// Sum of the products of the weights that two texts have in common; none where one of them has no weights.
    pub fn lexical_score(&self, other: &Self) -> Option<f32> {
        let (own, others) = (self.sparse.as_ref()?, other.sparse.as_ref()?);
        Some(own.iter().filter_map(|(id, weight)| Some(weight * others.get(id)?)).sum())
    }

    /// Mean over the tokens of this text, a query, of the largest cosine to a token of the other (ColBERT, arXiv
    /// 2004.12832); none where one of them has no vectors.
    pub fn late_score(&self, other: &Self) -> Option<f32> {
        let (own, others) = (self.multi.as_ref()?, other.multi.as_ref()?);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let best =
            |row: &Vec<f32>| others.iter().map(|other| dot(row, other)).fold(f32::MIN, f32::max);
        let count = own.len().min(if others.is_empty() { 0 } else { usize::MAX });
        (count > 0).then(|| own.iter().map(best).sum::<f32>() / count as f32)
    }
}

/// The error of a model that is asked for vectors and has none.
pub(crate) fn no_embedder(model: &Model) -> Error {
    let manifest = model.manifest().path.display();
    let op = &model.op().description.name;
    let what = match model.info().scores {
        0 => format!("host-op {op:?} does not embed"),
        _ => {
            "a bundle of the task score gives no vectors of texts; `qhx rerank` takes it".to_owned()
        }
    };
    error!(Usage, "{manifest}: {what}").hint("make the bundle with `qhx forge --task embed`")
}

/// Euclidean norm.
pub fn norm(vector: &[f32]) -> f64 {
    vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt()
}

/// Cosine of the angle between two vectors of one length.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    dot / (norm(a) * norm(b)).max(f64::MIN_POSITIVE)
}
