// Package conformance runs the Gateway API conformance suite, version 1.7.0, against Canal, and
// prints for each of its tests whether it passed, failed, or was not run and why, and the counts of
// each feature.
//
// The tests are the suite's own code, unchanged. Three things stand in for a cluster: [cluster], a
// client whose changes are made in a tenant by `canal apply`; [execServer], by which the suite runs
// its client in a pod; and package cmd/echo, the program of the suite's pods. Pods, nodes, gateways
// and the controller are a world's, with real processes and real traffic.
//
// It does not make Kubernetes: there are no defaults, no validation and no status, except what Canal
// says itself. Canal has no ingress Gateway yet, so tests of feature Gateway are not run; should it
// accept a GatewayClass one day, [gatewayTests] fails until it runs them.
//
// A failed test of the suite is a result, not an error: the exit code is 0 if the report is whole.
package conformance

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/config"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

var (
	canal    = flag.String("canal", "../../target/debug/canal", "path of canal, beside which its other programs stand")
	folder   = flag.String("folder", "../../target/conformance", "folder for the world's file, the pods' program and the suite's log")
	only     = flag.String("only", "", "run only the test of this name")
	outcomes []outcome
	judged   *cluster
	server   string
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := run(m); err != nil {
		fmt.Fprintf(os.Stderr, "conformance: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0) // a test of the suite that failed would make it 1
}

// run makes the world, runs the suite, whose words go to a file, and prints the report.
func run(m *testing.M) error {
	runtime.LockOSThread()
	// The world's processes have working directories of their own.
	folder, err := filepath.Abs(*folder)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	echo, err := buildEcho(folder)
	if err != nil {
		return err
	}
	topology, err := newTopology(meshManifests, echo)
	if err != nil {
		return err
	}
	file, err := topology.write(folder)
	if err != nil {
		return err
	}
	world, err := startWorld(*canal, file)
	if err != nil {
		return err
	}
	defer world.stop()
	if judged, err = newCluster(world, topology); err != nil {
		return err
	}
	if server, err = (&execServer{world, echo}).start(); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	report := os.Stdout
	os.Stdout = log
	if err := flag.Set("test.v", "true"); err != nil {
		return err
	}
	m.Run()
	if err := addReasons(outcomes, log.Name()); err != nil {
		return err
	}
	writeReport(report, outcomes)
	if len(outcomes) != len(tests.ConformanceTests) && *only == "" {
		return fmt.Errorf("%d of %d tests have a result; %s says why", len(outcomes), len(tests.ConformanceTests), log.Name())
	}
	return nil
}

func TestMesh(t *testing.T) {
	s := newSuite(t, features.SupportGateway)
	s.Setup(t, tests.ConformanceTests)
	for _, test := range tests.ConformanceTests {
		if !slices.Contains(test.Features, features.SupportMesh) || *only != "" && *only != test.ShortName {
			continue
		}
		result := outcome{test, failed, ""}
		if t.Run(test.ShortName, func(t *testing.T) { test.Run(t, s) }) {
			result.verdict = passed
		}
		result.reason = judged.takeRefusal()
		outcomes = append(outcomes, result)
	}
}

// TestGateway asks Canal for an ingress Gateway as the suite does: by a GatewayClass.
func TestGateway(t *testing.T) {
	if *only != "" {
		return
	}
	class := &gatewayv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "canal"}}
	class.Spec.ControllerName = "canal.mesh/gateway"
	err := judged.Create(t.Context(), class)
	if err == nil {
		t.Fatal("Canal accepts a GatewayClass now; fix: let this test run the suite's Gateway tests")
	}
	for _, test := range tests.ConformanceTests {
		if !slices.Contains(test.Features, features.SupportMesh) {
			outcomes = append(outcomes, outcome{test, notRun, "Canal has no ingress Gateway yet: " + judged.takeRefusal()})
		}
	}
}

// newSuite returns a suite of all features except one: Gateway's or the mesh's.
func newSuite(t *testing.T, except features.FeatureName) *suite.ConformanceTestSuite {
	access := &rest.Config{Host: server}
	clientset, err := kubernetes.NewForConfig(access)
	if err != nil {
		t.Fatal(err)
	}
	s, err := suite.NewConformanceTestSuite(suite.ConformanceOptions{
		ConfigurableOptions: suite.ConfigurableOptions{
			EnableAllSupportedFeatures: true,
			ExemptFeatures:             []features.FeatureName{except},
			DisableParallelTests:       true,
			CleanupTestResources:       true,
			AllowCRDsMismatch:          true,
			TimeoutConfig:              timeouts(),
		},
		Client:     judged,
		Clientset:  clientset,
		RestConfig: access,
		ManifestFS: []fs.FS{conformance.Manifests},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// timeouts are the suite's, except of answers that are not yet right: `canal apply` returns when the
// data planes run the change, so that a right answer comes at once, and the suite's 30 s would only
// make each failed request longer.
func timeouts() config.TimeoutConfig {
	timeouts := config.DefaultTimeoutConfig()
	timeouts.MaxTimeToConsistency = 10 * time.Second
	return timeouts
}
