//! The texts and images on their way to the model. They are read, tokenized and decoded on a thread of their own, while
//! graphs execute.
//!
//! Read-ahead is bounded: a few batches, each of as many tokens as are worth collecting, or of a megabyte of text. A
//! writer of the input who waits for an answer gets it: a batch ends if the next text is not there yet.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use qhx::{Embedder, Prefixed, TokenVectors};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_types::Media;

use super::row::Row;
use super::rows::Rows;

/// Batches that wait for the model.
const AHEAD: usize = 2;

/// Bytes of text after which a batch ends.
const MAX_BYTES: usize = 1 << 20;

/// Max delay of a Ctrl-C while there is no text.
const PATIENCE: Duration = Duration::from_millis(50);

/// Texts that are embedded together, or one image.
#[derive(Debug, Default)]
pub(super) struct Batch {
    rows: Vec<Row>,
    /// Tokens of each text.
    tokens: Vec<Vec<u32>>,
    /// In the place of the last row's text.
    image: Option<Media>,
}

impl Batch {
    /// Embeds the texts. An error of the model names the text.
    pub fn embed(
        &self,
        embedder: &mut Embedder,
        write: &mut dyn FnMut(&Row, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (mut written, mut unwritten) = (0, None);
        let embedded = embedder.embed_each(&self.tokens, |index, vector| {
            if let Err(e) = write(&self.rows[index], vector) {
                unwritten = Some(e);
                return Err(Error::new(ErrorKind::Io, "a vector was not written"));
            }
            written = index + 1;
            Ok(())
        });
        let embedded = match (&embedded, &self.image, self.rows.last()) {
            (Ok(()), Some(image), Some(row)) => match embedder.embed_media(image) {
                Ok(vector) => return write(row, vector),
                Err(e) => Err(e),
            },
            _ => embedded,
        };
        match (unwritten, embedded) {
            (Some(e), _) => Err(e),
            (None, Ok(())) => Ok(()),
            (None, Err(e)) => match self.rows.get(written) {
                Some(row) if row.image => Err(e.context(format_args!("image {}", row.index))),
                Some(row) => Err(e.context(format_args!("text {}", row.index))),
                None => Err(e),
            },
        }
    }
}

impl Batch {
    /// Embeds the texts one by one, with what the model gives for their tokens.
    pub fn embed_tokens(
        &self,
        embedder: &mut Embedder,
        write: &mut dyn FnMut(&Row, &TokenVectors) -> Result<()>,
    ) -> Result<()> {
        if let (Some(_), Some(row)) = (&self.image, self.rows.last()) {
            let what = format!("image {}: an image has no tokens", row.index);
            return Err(Error::new(ErrorKind::Usage, what)
                .hint("leave out --sparse and --multi, or the images"));
        }
        for (row, tokens) in self.rows.iter().zip(&self.tokens) {
            let embedded = embedder.embed_tokenized(tokens);
            write(row, &embedded.map_err(|e| e.context(format_args!("text {}", row.index)))?)?;
        }
        Ok(())
    }
}

/// The batches of an input, in order.
pub(super) struct Batches {
    /// None at the end of the input.
    receiver: Receiver<Result<Option<Batch>>>,
}

impl Batches {
    /// Begins to read. A batch has at most `tokens` tokens, or one text.
    pub fn start(rows: Rows, texts: Prefixed, tokens: usize) -> Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(AHEAD);
        // Nobody joins it: it may wait for an input that never ends. It ends when the receiver is gone, or with the
        // program.
        std::thread::Builder::new()
            .name("read and tokenize".to_owned())
            .spawn(move || send(rows, &texts, tokens, &sender))
            .map_err(|e| {
                Error::caused(ErrorKind::Internal, "the thread that reads texts cannot start", e)
            })?;
        Ok(Self { receiver })
    }

    /// The next batch; none at the end of the input. An error belongs behind the texts before it.
    pub fn next(&self, cancel: &CancelToken) -> Result<Option<Batch>> {
        loop {
            if cancel.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            match self.receiver.recv_timeout(PATIENCE) {
                Ok(batch) => return batch,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "the thread that reads texts ended before the input did",
                    ));
                }
            }
        }
    }
}

/// Sends batches until the input ends, something fails, or nobody receives them any more.
fn send(
    mut rows: Rows,
    texts: &Prefixed,
    tokens: usize,
    sender: &SyncSender<Result<Option<Batch>>>,
) {
    loop {
        let (batch, end) = gather(&mut rows, texts, tokens);
        if !batch.rows.is_empty() && sender.send(Ok(Some(batch))).is_err() {
            return;
        }
        if let Some(end) = end {
            // An error means that nobody receives.
            let _ = sender.send(end.map(|()| None));
            return;
        }
    }
}

/// The next texts, and how the input ends where it ends behind them.
fn gather(rows: &mut Rows, texts: &Prefixed, most: usize) -> (Batch, Option<Result<()>>) {
    let mut batch = Batch::default();
    let (mut tokens, mut bytes) = (0, 0);
    loop {
        let row = match rows.next() {
            Ok(Some(row)) => row,
            Ok(None) => return (batch, Some(Ok(()))),
            Err(e) => return (batch, Some(Err(e))),
        };
        let what = if row.image { "image" } else { "text" };
        let read = match row.image {
            true => texts.image(&row.text).map(|image| batch.image = Some(image)),
            false => texts.tokens(&row.text, row.role).map(|ids| {
                tokens += ids.len();
                bytes += row.text.len();
                batch.tokens.push(ids);
            }),
        };
        if let Err(e) = read {
            return (batch, Some(Err(e.context(format_args!("{what} {}", row.index)))));
        }
        batch.rows.push(row);
        if batch.image.is_some() || tokens >= most || bytes >= MAX_BYTES || !rows.ready() {
            return (batch, None);
        }
    }
}
