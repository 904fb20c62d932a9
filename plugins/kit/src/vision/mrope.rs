//! Rotary tables by the place of each token: text counts on, images stand as squares.

use crate::decoder::{Chunk, Filler, GraphVariant};
use crate::fill::{Rope, RopeParams, RopeTables, Sections};
use qhx_op::{Error, Host, Result};

/// Fills `cos` and `sin` of a decoder for positions of three axes (M-RoPE), those of [`Chunk::track`].
#[derive(Debug)]
pub struct Mrope {
    rope: Rope,
    tables: Vec<RopeTables>,
    /// Positions of the tokens of a step; holds as many as the widest pass takes.
    at: Vec<[usize; 3]>,
}

impl Mrope {
    /// The tables of a manifest, with axes that take turns whatever the manifest declares about their order.
    /// `published` are the pairs by axis of checkpoints whose bundles do not say them; they count where they add up to
    /// half the rotary dimension.
    ///
    /// # Errors
    /// When the bundle takes `images` and nothing declares the pairs, or as [`RopeParams::rope`].
    pub fn interleaved(
        mut params: RopeParams,
        published: [usize; 3],
        images: bool,
    ) -> Result<Self> {
        let pairs: usize = published.iter().sum();
        params.sections = match params.sections {
            Some(Sections::Chunked(section) | Sections::Interleaved(section)) => {
                Some(Sections::Interleaved(section))
            }
            None if params.rotary_dim == Some(2 * pairs) => Some(Sections::Interleaved(published)),
            None => None,
        };
        Self::declared(params, images)
    }

    /// The tables of a manifest, with axes in the order that the manifest declares.
    ///
    /// # Errors
    /// Errors of [`Self::interleaved`].
    pub fn declared(params: RopeParams, images: bool) -> Result<Self> {
        if images && params.sections.is_none() {
            return Err(Error::manifest(
                "manifest params.rope_scaling.mrope_section is missing: it says which pairs of a head turn by time, \
                 row and column of an image",
            ));
        }
        Ok(Self { rope: params.rope()?, tables: Vec::new(), at: Vec::new() })
    }
}

impl Filler for Mrope {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        self.tables.push(self.rope.bind_all(host, pass.graphs, pass.rows)?);
        self.at.reserve(pass.rows);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        self.at.clear();
        let slots = chunk.position..chunk.position + chunk.tokens.len();
        self.at.extend(slots.map(|slot| chunk.track.at(slot)));
        self.tables[chunk.pass].fill_at(host, &mut self.rope, &self.at)
    }
}
