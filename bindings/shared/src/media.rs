//! Images, audio and videos of a request, as languages hand them over.

use std::ffi::OsString;

use qhx::{Attached, Attachment, Error, ErrorKind, Limits, Media, Modality, Model, Source};

use crate::fault::{Fault, Result};

/// A medium of a request.
///
/// | kind | content |
/// |---|---|
/// | `image`, `audio`, `video` | none: the name is a path or a `data:` URL; or else the bytes of a file |
/// | `pixels` | RGB of 8 bits each, row by row |
/// | `samples` | mono f32 in −1…1, little-endian |
#[derive(Debug)]
pub struct Given<B> {
    /// A word of the table.
    pub kind: String,
    /// Name in error messages, or a path.
    pub name: OsString,
    /// Content as listed in the table.
    pub content: Option<B>,
    /// Width and height of `pixels`, the rate of `samples` and 0.
    pub numbers: (u32, u32),
}

/// An image, audio clip or video that is or can be decoded.
#[derive(Debug)]
pub enum Item {
    /// A file, or samples.
    File(Attachment),
    /// An image that is decoded.
    Pixels(Attached),
}

impl Item {
    /// Checks what there is to check without a model.
    ///
    /// # Errors
    /// When there is no such kind, or numbers and content do not fit.
    pub fn new<B: AsRef<[u8]>>(given: Given<B>) -> Result<Self> {
        let Given { kind, name, content, numbers: (a, b) } = given;
        let content = content.as_ref().map(AsRef::as_ref);
        let shown = || name.to_string_lossy().into_owned();
        let file = |modality| match content {
            None => Attachment::new(modality, name.clone()),
            Some(bytes) => {
                let source = Source::Bytes { name: shown(), bytes: bytes.to_vec() };
                Ok(Attachment::from_source(modality, source))
            }
        };
        let bytes = || content.unwrap_or_default();
        Ok(match kind.as_str() {
            "image" => Self::File(file(Modality::Image)?),
            "audio" => Self::File(file(Modality::Audio)?),
            "video" => Self::File(file(Modality::Video)?),
            "pixels" => {
                let (name, max) = (shown(), Limits::default().pixels);
                if u64::from(a) * u64::from(b) > max {
                    let message = format!("{name}: {a} × {b} pixels, at most {max} are taken");
                    return Err(Error::new(ErrorKind::Prompt, message)
                        .hint("scale it down first: a model sees a few megapixels of it at most")
                        .into());
                }
                let media = Media::image(bytes().to_vec(), a, b);
                let media = media.map_err(|e| Error::of(ErrorKind::Prompt, e).context(&name))?;
                Self::Pixels(Attached::new(name, media))
            }
            "samples" => {
                let floats = bytes().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                Self::File(Attachment::samples(shown(), &floats.collect::<Vec<_>>(), a)?)
            }
            other => return Err(Fault::usage(format!("no medium is called {other:?}"))),
        })
    }

    /// Decodes it by the rules of the model's host-op.
    pub(crate) fn read(&self, model: &Model) -> qhx::Result<Attached> {
        match self {
            Self::File(attachment) => attachment.read(model, None),
            Self::Pixels(attached) => Ok(attached.clone()),
        }
    }
}
