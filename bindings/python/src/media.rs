//! Images, audio and videos of a request, as Python hands them over.

use std::ffi::OsString;

use pyo3::pybacked::PyBackedBytes;
use qhx::{Attached, Attachment, Error, ErrorKind, Limits, Media, Modality, Model, Source};

use crate::fault::{Fault, Result};

/// Kind, name or path, content, and two numbers: width and height of `pixels`, the rate of `samples`.
///
/// | kind | content |
/// |---|---|
/// | `image`, `audio`, `video` | none: the name is a path or a `data:` URL; or else the bytes of a file |
/// | `pixels` | RGB of 8 bits each, row by row |
/// | `samples` | mono f32 in −1…1, little-endian |
pub(crate) type Given = (String, OsString, Option<PyBackedBytes>, (u32, u32));

/// An image, audio clip or video that is or can be decoded.
#[derive(Debug)]
pub(crate) enum Item {
    File(Attachment),
    Pixels(Attached),
}

impl Item {
    /// Checks what there is to check without a model.
    pub(crate) fn new((kind, name, content, (a, b)): Given) -> Result<Self> {
        let shown = || name.to_string_lossy().into_owned();
        let file = |modality| match &content {
            None => Attachment::new(modality, name.clone()),
            Some(bytes) => {
                let source = Source::Bytes { name: shown(), bytes: bytes.to_vec() };
                Ok(Attachment::from_source(modality, source))
            }
        };
        let bytes = || content.as_deref().unwrap_or_default();
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
            Self::File(attachment) => {
                attachment.check_taken(&model.op().description)?;
                attachment.read(model, None)
            }
            Self::Pixels(attached) => Ok(attached.clone()),
        }
    }
}
