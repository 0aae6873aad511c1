//! fjall: a log-structured merge tree in a directory.

use std::path::Path;

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use crate::{Catalog, Result};

const CACHE_BYTES: u64 = 64 << 20;

pub struct Fjall {
    database: Database,
    records: Keyspace,
}

impl Fjall {
    fn at(dir: &Path) -> Result<Self> {
        let database = Database::builder(dir.join("catalog.fjall")).cache_size(CACHE_BYTES).open()?;
        let records = database.keyspace("records", KeyspaceCreateOptions::default)?;
        Ok(Self { database, records })
    }
}

impl Catalog for Fjall {
    fn create(dir: &Path, _: u64) -> Result<Self> {
        Self::at(dir)
    }

    fn open(dir: &Path, _: u64, visit: &mut dyn FnMut(&[u8])) -> Result<Self> {
        let opened = Self::at(dir)?;
        for entry in opened.records.iter() {
            visit(&entry.value()?);
        }
        Ok(opened)
    }

    fn commit(&mut self, records: &[(u64, Vec<u8>)]) -> Result<()> {
        let mut batch = self.database.batch();
        for (id, bytes) in records {
            batch.insert(&self.records, id.to_be_bytes(), bytes.as_slice());
        }
        batch.commit()?;
        self.database.persist(PersistMode::SyncData)?;
        Ok(())
    }

    fn close(self) -> Result<()> {
        self.database.persist(PersistMode::SyncAll)?;
        Ok(())
    }
}
