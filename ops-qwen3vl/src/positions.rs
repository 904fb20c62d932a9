//! Rotary tables by the place of each token: text counts on, pictures stand as squares.

use qhx_op::decoder::{Chunk, Filler, Pass};
use qhx_op::fill::{Rope, RopeTables};
use qhx_op::{Host, Result};

/// Fills `cos` and `sin`.
#[derive(Debug)]
pub(crate) struct Positions {
    rope: Rope,
    tables: Vec<RopeTables>,
    /// Those of the tokens of a step; holds as many as the widest pass takes.
    at: Vec<[usize; 3]>,
}

impl Positions {
    pub fn new(rope: Rope) -> Self {
        Self { rope, tables: Vec::new(), at: Vec::new() }
    }
}

impl Filler for Positions {
    fn bind(&mut self, host: &mut Host, pass: Pass<'_>) -> Result<()> {
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
