//! Traits that an author implements.

use crate::{
    Answer, Error, Host, OpDescription, OpenInfo, Placement, Result, Segment, SnapshotId, View,
};

/// The step logic of one model family over one open bundle.
///
/// The engine owns the loop, sampling, text and chat; the op consumes tokens and returns
/// logits, or consumes texts and returns vectors. What it does is a [`Generator`], an [`Encoder`], a [`Recognizer`], a
/// [`Synthesizer`], or several of them.
pub trait Op: Sized + Send + 'static {
    /// Declaration of the op before any bundle is opened.
    fn describe() -> OpDescription;

    /// Binds graphs and tables. Validates every tensor name, shape and dtype it needs and reports
    /// which is wrong.
    ///
    /// # Errors
    /// When the bundle is not one that the op can run.
    fn open(host: &mut Host) -> Result<Self>;

    /// Properties found on opening: read once, and constant from then on.
    fn info(&self) -> OpenInfo;

    /// The part that generates, where the op does: a field such as the kit's decoder, or the op itself.
    fn generator(&mut self) -> Option<&mut dyn Generator> {
        None
    }

    /// The part that embeds, where the op does.
    fn encoder(&mut self) -> Option<&mut dyn Encoder> {
        None
    }

    /// The part that answers in steps of its own, where the op does.
    fn recognizer(&mut self) -> Option<&mut dyn Recognizer> {
        None
    }

    /// The part that speaks, where the op does.
    fn synthesizer(&mut self) -> Option<&mut dyn Synthesizer> {
        None
    }
}

/// The steps of an op that generates.
///
/// A call that fails, also because [`Host::execute`] reports that the work is cancelled,
/// must leave the state as it was after the last complete token: change state (swap, append,
/// count) only once the last graph of a step has executed.
///
/// A call that an op leaves out goes to its [`Generator::inner`], such as the decoder or the state of the kit; without
/// one, it is an error that names it.
pub trait Generator {
    /// Generator that answers the calls that this one leaves out.
    fn inner(&self) -> Option<&dyn Generator> {
        None
    }

    /// Same as [`Generator::inner`], with mutable access to run it.
    fn inner_mut(&mut self) -> Option<&mut dyn Generator> {
        None
    }

    /// Place of an image, audio clip or video among the tokens of a prompt, and the number of positions it takes. The
    /// host calls it before [`Generator::prefill`] gets the segment, possibly more than once. It should look at sizes
    /// only.
    ///
    /// # Errors
    /// When the op does not take the segment.
    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        match self.inner() {
            Some(inner) => inner.place(segment),
            None => Err(Error::unsupported(&format!("placing {}", crate::text::kind(segment)))),
        }
    }

    /// Forgets everything: position 0.
    ///
    /// # Errors
    /// When it fails.
    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.inner_mut().map_or(Ok(()), |inner| inner.reset(host))
    }

    /// Positions consumed so far.
    fn position(&self) -> usize {
        self.inner().map_or(0, |inner| inner.position())
    }

    /// Consumes segments; returns the logits of the last position. An image, audio clip or video
    /// takes the positions that [`Generator::place`] declared.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        or_unsupported(self.inner_mut(), "generation")?.prefill(host, segments)
    }

    /// Consumes one token; returns the logits of its position. Must not allocate.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        or_unsupported(self.inner_mut(), "generation")?.decode(host, token)
    }

    /// Runs tokens through the graphs of one step. The state stays as it is until [`Generator::accept`].
    /// Must not allocate.
    ///
    /// # Errors
    /// When the op verifies no draft tokens, or the call fails.
    fn verify(&mut self, host: &mut Host, tokens: &[u32]) -> Result<()> {
        or_unsupported(self.inner_mut(), "verifying draft tokens")?.verify(host, tokens)
    }

    /// Logits of the position of token `row` of the last [`Generator::verify`]. Must not allocate.
    ///
    /// # Errors
    /// When the op verifies no draft tokens, or the call fails.
    fn row_logits(&mut self, host: &mut Host, row: usize) -> Result<View> {
        or_unsupported(self.inner_mut(), "verifying draft tokens")?.row_logits(host, row)
    }

    /// Keeps the first `count` tokens of the last [`Generator::verify`]: the state becomes that of these alone.
    /// Must not allocate.
    ///
    /// # Errors
    /// When the op verifies no draft tokens, or the call fails.
    fn accept(&mut self, host: &mut Host, count: usize) -> Result<()> {
        or_unsupported(self.inner_mut(), "verifying draft tokens")?.accept(host, count)
    }

    /// Declares whether [`Generator::draft`] will be called from here on: what is consumed meanwhile is remembered for
    /// it.
    ///
    /// # Errors
    /// When the op has no drafting head.
    fn drafting(&mut self, host: &mut Host, on: bool) -> Result<()> {
        or_unsupported(self.inner_mut(), "a drafting head")?.drafting(host, on)
    }

    /// Logits of the token that may follow `token`, which itself follows the text and is not consumed; called again, of
    /// one token further. Must not allocate.
    ///
    /// # Errors
    /// When the op has no drafting head, or the call fails.
    fn draft(&mut self, host: &mut Host, token: u32) -> Result<View> {
        or_unsupported(self.inner_mut(), "a drafting head")?.draft(host, token)
    }

    /// Forgets all positions from `position` on.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn truncate(&mut self, host: &mut Host, position: usize) -> Result<()> {
        or_unsupported(self.inner_mut(), "truncation")?.truncate(host, position)
    }

    /// Saves the state.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn snapshot(&mut self, host: &mut Host) -> Result<SnapshotId> {
        or_unsupported(self.inner_mut(), "snapshots")?.snapshot(host)
    }

    /// Returns to a saved state, which stays saved.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn restore(&mut self, host: &mut Host, snapshot: SnapshotId) -> Result<()> {
        or_unsupported(self.inner_mut(), "snapshots")?.restore(host, snapshot)
    }

    /// Frees a saved state. An unknown id is ignored.
    fn drop_snapshot(&mut self, host: &mut Host, snapshot: SnapshotId) {
        if let Some(inner) = self.inner_mut() {
            inner.drop_snapshot(host, snapshot);
        }
    }

    /// Findings about the consumed input besides the logits: a JSON object, such as `{"language": "de"}`.
    fn note(&self) -> serde_json::Value {
        self.inner().map_or(serde_json::Value::Null, |inner| inner.note())
    }

    /// The state as bytes, for [`Generator::import_state`] of an op of the same name over the same bundle.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn export_state(&mut self, host: &mut Host) -> Result<Vec<u8>> {
        or_unsupported(self.inner_mut(), "exporting its state")?.export_state(host)
    }

    /// Makes the state the one that was exported at `position`. The bytes may be damaged or hostile.
    ///
    /// # Errors
    /// When the op does not have the call, or the bytes are not such a state. The state is then as it was.
    fn import_state(&mut self, host: &mut Host, position: usize, state: &[u8]) -> Result<()> {
        or_unsupported(self.inner_mut(), "importing a state")?.import_state(host, position, state)
    }
}

/// [`Generator::inner`] and [`Generator::inner_mut`] of an op that adds to the generator in its field `$field`.
#[macro_export]
macro_rules! inner_generator {
    ($field:tt) => {
        fn inner(&self) -> Option<&dyn $crate::Generator> {
            Some(&self.$field)
        }

        fn inner_mut(&mut self) -> Option<&mut dyn $crate::Generator> {
            Some(&mut self.$field)
        }
    };
}

/// The inner generator, or an error about a call that needs one.
fn or_unsupported<'a>(
    inner: Option<&'a mut dyn Generator>,
    what: &str,
) -> Result<&'a mut dyn Generator> {
    inner.ok_or_else(|| Error::unsupported(what))
}

/// An op that steps by itself, because a step of its model is no token: CTC, transducers, labels. It declares
/// [`Task::Transcribe`](crate::Task::Transcribe), and nothing of it is kept from one answer to the next, unless it is
/// given audio piece by piece ([`OpenInfo::streams`]). A [`Generator`] with [`OpenInfo::aligns`] is one, too, for the
/// times of what it generated.
pub trait Recognizer {
    /// Answers to audio, or to what else the op takes. Clips longer than the op takes at once are an error that says
    /// how long they may be: the host cuts them and asks again.
    ///
    /// # Errors
    /// When the segments are not what the op takes, or a graph fails.
    fn answer(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Answer>;

    /// Forgets the audio so far, of an op that is given audio piece by piece.
    ///
    /// # Errors
    /// When it fails.
    fn reset(&mut self, host: &mut Host) -> Result<()> {
        let _ = host;
        Ok(())
    }
}

/// An op that makes audio: it declares [`Task::Speak`](crate::Task::Speak) and [`OpenInfo::sound_out`].
pub trait Synthesizer {
    /// Says a text: returns the samples of its beginning, f32. Called again with no segments, it returns those that
    /// follow, and an empty view where there are none.
    ///
    /// # Errors
    /// When the segments are not what the op takes, or a graph fails.
    fn speak(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View>;
}

/// The step of an op that embeds.
pub trait Encoder {
    /// Embeds one text: pooling and normalisation are the op's. Returns f32. With [`OpenInfo::scores`] it scores the
    /// text, or the pair of texts that are two segments.
    ///
    /// # Errors
    /// When it fails.
    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View>;

    /// Embeds texts in one execution of the graphs, as if each were alone: it attends to itself only, and its positions
    /// begin at 0. The host decides which texts go together: at least one, together of at most as many tokens as the
    /// longest of [`OpenInfo::packing`]. Returns f32, [`OpenInfo::values`] a text, one text behind the other.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn embed_many(&mut self, host: &mut Host, texts: &[&[u32]]) -> Result<View> {
        let _ = (host, texts);
        Err(Error::unsupported("embedding several texts at once"))
    }

    /// Embeds one text, as [`Encoder::embed`] does, and gives what [`OpenInfo::of_tokens`] declares for its tokens.
    /// Returns f32: the vector, a weight for each token where there are such, and the vectors of the tokens.
    ///
    /// # Errors
    /// When the op does not have the call, or it fails.
    fn embed_tokens(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let _ = (host, segments);
        Err(Error::unsupported("values for each token of a text"))
    }
}
