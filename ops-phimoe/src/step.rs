//! Graphs of attention and router, one a layer, and what is filled of their inputs.

use qhx_op::decoder::HiddenRows;
use qhx_op::experts::Residual;
use qhx_op::fill::{Embedding, Rope, RopeTables, StepMask};
use qhx_op::{GraphId, Host, Result};

/// The layers of a step of some tokens.
#[derive(Debug)]
pub(crate) struct Step {
    pub residual: Residual,
    tables: RopeTables,
    /// Of graphs that read caches: others have one that never changes.
    pub mask: Option<StepMask>,
}

impl Step {
    /// Binds everything but caches and masks.
    pub fn open(host: &mut Host, graphs: Vec<GraphId>, rope: &Rope) -> Result<Self> {
        let residual = Residual::open(host, graphs, None)?;
        let tables = rope.bind_all(host, &residual.graphs, residual.rows)?;
        Ok(Self { residual, tables, mask: None })
    }

    /// Rows of the residual, for the head.
    pub fn hidden_rows(&self, host: &Host) -> Result<HiddenRows> {
        let (graph, port, view) = self.residual.last(host)?;
        Ok(HiddenRows { graph, port, view, rows: self.residual.rows })
    }

    /// Fills everything for tokens from `position` on.
    pub fn fill(
        &mut self,
        host: &mut Host,
        embedding: &Embedding,
        rope: &mut Rope,
        tokens: &[u32],
        position: usize,
    ) -> Result<()> {
        let x = self.residual.x;
        embedding.gather_rows(host, tokens, x.buffer, x.dtype)?;
        self.tables.fill(host, rope, position);
        if let Some(mask) = &mut self.mask {
            mask.fill(host, position);
        }
        Ok(())
    }
}
