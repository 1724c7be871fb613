package conformance

import (
	"bufio"
	"os"
	"regexp"
	"strings"
)

var (
	// testLine names the test to which the log's next lines belong.
	testLine = regexp.MustCompile(`^=== (?:RUN|NAME|CONT)\s+\w+/([^/\s]+)`)
	// reasonLine is a line by which the suite says why a check failed, without its repetitions' times.
	reasonLine = regexp.MustCompile(`(?:not ready yet: |Error:\s+|failed: )(.*?)(?: \(after [^)]*\))?$`)
)

// addReasons gives each failed test without a reason the last one that the suite's log has for it.
func addReasons(outcomes []outcome, logPath string) error {
	log, err := os.Open(logPath)
	if err != nil {
		return err
	}
	defer log.Close()
	reasons := map[string]string{}
	name := ""
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		if found := testLine.FindStringSubmatch(lines.Text()); found != nil {
			name = found[1]
		} else if found := reasonLine.FindStringSubmatch(lines.Text()); found != nil {
			reasons[name] = strings.TrimSpace(found[1])
		}
	}
	for i, o := range outcomes {
		if o.verdict == failed && o.reason == "" {
			outcomes[i].reason = reasons[o.test.ShortName]
		}
	}
	return lines.Err()
}
