//! Embedding many texts: from files, in batches, into files that a later run can continue.

mod batches;
mod fingerprint;
mod output;
#[cfg(feature = "parquet")]
mod parquet;
mod record;
mod row;
mod rows;

use std::fmt;
use std::path::Path;

use batches::Batches;
use qhx::{Embedder, TokenVectors};
use qhx_base::{CancelToken, Error, ErrorKind, Result};

pub use fingerprint::Fingerprint;
pub use output::{Claimed, Existing, VectorFile};
pub use row::{MAX_LINE, Row, RowOptions, Shard, Vector};
pub use rows::Rows;

/// Embeds texts until there are no more, and calls `write` with each and its vector, in order. Texts are read and
/// tokenized on a thread of their own, while graphs execute. `pack`: short texts share graphs where the model has such.
///
/// ```no_run
/// use qhx_tools::corpus::{RowOptions, Rows, embed};
///
/// let mut embedder = qhx::Bundle::open("embedcode/v81")?.embedder()?;
/// let rows = Rows::open("corpus.jsonl".as_ref(), RowOptions::default())?;
/// embed(&mut embedder, rows, true, &qhx::CancelToken::new(), |row, vector| {
///     println!("{}: {} values", row.index, vector.len());
///     Ok(())
/// })?;
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When a row is not a text or does not fit the encoder, when the model fails, and any error of `write`; texts before
/// it are written. When it is cancelled.
pub fn embed(
    embedder: &mut Embedder,
    rows: Rows,
    pack: bool,
    cancel: &CancelToken,
    mut write: impl FnMut(&Row, &[f32]) -> Result<()>,
) -> Result<()> {
    let tokens = if pack { embedder.model().batch_tokens() } else { 0 };
    let batches = Batches::start(rows, embedder.texts().clone(), tokens)?;
    while let Some(batch) = batches.next(cancel)? {
        batch.embed(embedder, &mut write)?;
    }
    Ok(())
}

/// Same as [`embed`], with weights and vectors of each text's tokens beside its vector: one text in one execution.
///
/// # Errors
/// Errors of [`embed`], and when the model gives nothing for tokens, or a row is an image.
pub fn embed_tokens(
    embedder: &mut Embedder,
    rows: Rows,
    cancel: &CancelToken,
    mut write: impl FnMut(&Row, &TokenVectors) -> Result<()>,
) -> Result<()> {
    let batches = Batches::start(rows, embedder.texts().clone(), 0)?;
    while let Some(batch) = batches.next(cancel)? {
        batch.embed_tokens(embedder, &mut write)?;
    }
    Ok(())
}

/// True for the name of a Parquet table.
fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("parquet"))
}

/// The error of a file that is not to be read or written.
fn refused(path: &Path, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Usage, format!("{}: {what}", path.display()))
}

/// Refuses Parquet tables where this crate was built without them.
fn check_parquet(path: &Path) -> Result<()> {
    if cfg!(feature = "parquet") || !is_parquet(path) {
        return Ok(());
    }
    Err(refused(path, "this qhx was built without Parquet")
        .hint("build it with --features parquet, or convert the file to JSON lines"))
}
