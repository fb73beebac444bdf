//! Writes the step journal that `octavo_wire::journal` describes.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use octavo_core::scheduler::Core;
use octavo_wire::journal;

/// A file that says which requests are in the steps in flight; it keeps its content when the process is killed.
#[derive(Debug)]
pub struct Journal {
    file: File,
    requests: Vec<u64>,
    bytes: Vec<u8>,
}

impl Journal {
    /// Makes the file, empty, readable by its owner alone.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        Ok(Self {
            file: options.open(path)?,
            requests: Vec::new(),
            bytes: Vec::new(),
        })
    }

    /// Notes what is in flight now. A disk that is full costs the blame, not the step.
    pub(crate) fn write(&mut self, core: &Core) {
        self.requests.clear();
        self.requests
            .extend(core.requests_in_flight().map(|id| id.0));
        self.requests.sort_unstable();
        self.requests.dedup();
        journal::encode(core.last_scheduled().0, &self.requests, &mut self.bytes);
        let _ = self.file.write_all_at(&self.bytes, 0);
    }
}
