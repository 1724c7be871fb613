package conformance

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/yaml"
)

const (
	tenantName = "conformance"
	// clientHost is a client outside the mesh, as which the suite itself runs.
	clientHost = "clients/default/client-0"
	// usableAddress is in the pool of Gateways' addresses, unusableAddress is not.
	usableAddress   = "198.19.0.60"
	unusableAddress = "203.0.113.9"
)

// baseManifests are the suite's objects that all mesh tests and all Gateway tests share.
var baseManifests = []string{"mesh/manifests.yaml", "base/manifests.yaml"}

// topology is what a world is made from: the suite's Deployments become pods of one tenant, one for
// each replica, and its Services the tenant's, with the addresses that a cluster would give them.
type topology struct {
	// folder has the pods' program and the files of their volumes.
	folder   string
	pods     []topologyPod
	services []*unstructured.Unstructured
}

// topologyPod is a pod in the words of a world's file.
type topologyPod struct {
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	Node      string            `json:"node"`
	Labels    map[string]string `json:"labels"`
	Command   []string          `json:"command"`
	Env       map[string]string `json:"env"`
	Readiness map[string]any    `json:"readiness"`
}

// hostName is the pod's name in the world, which numbers its pods.
func (p topologyPod) hostName() string { return p.Name + "-0" }

// newTopology reads the suite's manifests. The Services are those that all tests share. The pods are
// those of all tests, because a world's file names them all; a test that applies a Deployment finds
// its pods there.
func newTopology(folder string, all []suite.ConformanceTest) (*topology, error) {
	t := &topology{folder: folder}
	manifests := slices.Clone(baseManifests)
	for _, test := range all {
		manifests = append(manifests, test.Manifests...)
	}
	read := map[string]bool{}
	for i, manifest := range manifests {
		objects, err := readObjects(manifest)
		if err != nil {
			return nil, err
		}
		for _, object := range objects {
			key := keyOf(object)
			switch kind := object.GetKind(); {
			case kind == "Deployment" && !read[key]:
				err = t.addPods(object)
			case kind == "Service" && !read[key] && i < len(baseManifests):
				t.services = append(t.services, object)
				err = setAddresses(object, len(t.services))
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", manifest, key, err)
			}
			read[key] = true
		}
	}
	return t, nil
}

// addPods adds a pod for each replica. The suite takes the backend of an answer from the pod's name
// without its last two parts, so a pod is named DEPLOYMENT-rN, to which the world adds its number.
func (t *topology) addPods(object *unstructured.Unstructured) error {
	deployment := &appsv1.Deployment{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, deployment); err != nil {
		return err
	}
	replicas := 1
	if deployment.Spec.Replicas != nil {
		replicas = int(*deployment.Spec.Replicas)
	}
	spec := deployment.Spec.Template.Spec
	for i := range replicas {
		// Pods alternate between the two nodes of the world.
		pod := topologyPod{
			Name:      fmt.Sprintf("%s-r%d", deployment.Name, i),
			Namespace: deployment.Namespace,
			Node:      fmt.Sprintf("node-%d", len(t.pods)%2+1),
			Labels:    deployment.Spec.Template.Labels,
			Command:   []string{filepath.Join(t.folder, "echo"), "basic"},
			Env:       map[string]string{"POD_NAME": "", "NAMESPACE": deployment.Namespace},
		}
		pod.Env["POD_NAME"] = pod.hostName()
		for _, variable := range spec.Containers[0].Env {
			// Fields of the pod that Kubernetes would fill in are set above.
			if variable.ValueFrom == nil {
				pod.Env[variable.Name] = t.volumePath(deployment.Namespace, &spec, variable.Value)
			}
		}
		// What is no number gives port 0, and such a pod never becomes ready.
		port, _ := strconv.Atoi(cmp.Or(pod.Env["TCP_PORT"], "3000"))
		if strings.Contains(spec.Containers[0].Image, "/echo-advanced:") {
			// That image's default, which `--port` replaces.
			port = 8080
			pod.Command[1] = "advanced"
			pod.Command = append(pod.Command, spec.Containers[0].Args...)
			if len(spec.Containers[0].Args) == 0 {
				pod.Command = append(pod.Command, fmt.Sprintf("--port=%d", port))
			}
		}
		// A probe each second, so that a test need not wait long for its pods. Nobody measured the value.
		pod.Readiness = map[string]any{"tcp": map[string]any{"port": port}, "periodMs": 1000}
		// A server of UDP has no port to connect to, so it counts as ready at once.
		if pod.Env["UDP_ECHO_SERVER"] != "" {
			pod.Readiness = map[string]any{"exec": []string{"true"}}
		}
		t.pods = append(t.pods, pod)
	}
	return nil
}

// volumePath returns the file that a value names which is a path in one of the pod's volumes, and
// any other value as it is.
func (t *topology) volumePath(namespace string, spec *corev1.PodSpec, value string) string {
	for _, mount := range spec.Containers[0].VolumeMounts {
		for _, volume := range spec.Volumes {
			kind, name, items := "Secret", "", []corev1.KeyToPath(nil)
			if volume.Secret != nil {
				name, items = volume.Secret.SecretName, volume.Secret.Items
			} else if volume.ConfigMap != nil {
				kind, name, items = "ConfigMap", volume.ConfigMap.Name, volume.ConfigMap.Items
			}
			for _, item := range items {
				if volume.Name == mount.Name && value == path.Join(mount.MountPath, item.Path) {
					return filepath.Join(volumeFolder(t.folder, kind, namespace, name), item.Key)
				}
			}
		}
	}
	return value
}

// volumeFolder has a file for each key of the Secret or ConfigMap.
func volumeFolder(folder, kind, namespace, name string) string {
	return filepath.Join(folder, "volumes", kind, namespace, name)
}

// setAddresses gives a Service the number-th address of each family of the tenant's Services.
func setAddresses(service *unstructured.Unstructured, number int) error {
	addresses := []string{fmt.Sprintf("10.101.0.%d", number), fmt.Sprintf("fd00:101::%x", number)}
	if err := unstructured.SetNestedField(service.Object, addresses[0], "spec", "clusterIP"); err != nil {
		return err
	}
	return unstructured.SetNestedStringSlice(service.Object, addresses, "spec", "clusterIPs")
}

// write writes the file of a world of this name, and the tenant's Services, and returns the file.
// The clients' tenant has the network on which Gateways get addresses. The ranges of both tenants
// are chosen to differ.
func (t *topology) write(world string) (string, error) {
	var services bytes.Buffer
	for _, service := range t.services {
		text, err := yaml.Marshal(service.Object)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&services, "---\n%s", text)
	}
	if err := os.WriteFile(filepath.Join(t.folder, "services.yaml"), services.Bytes(), 0o644); err != nil {
		return "", err
	}
	type object = map[string]any
	text, err := yaml.Marshal(object{
		"world":      world,
		"azs":        []string{"az1"},
		"controller": object{"az": "az1"},
		"edges":      []object{{"name": "edge-1", "az": "az1"}},
		"gateways": []object{
			{"name": "gw-1", "az": "az1", "backend": "b1"}, {"name": "gw-2", "az": "az1", "backend": "b1"},
		},
		"tenants": []object{{
			"name": "clients",
			// Any VNI that the other tenant does not have.
			"vni":            700,
			"trustDomain":    "clients.example",
			"podCidrs":       []string{"198.18.0.0/17", "2001:db8:18::/64"},
			"gatewayCidrs":   []string{"198.19.0.0/22", "2001:db8:19::/64"},
			"ingressNetwork": true,
			"nodes":          []object{{"name": "border", "az": "az1", "proxy": false}},
			"pods":           []object{{"name": "client", "namespace": "default", "node": "border", "command": []string{"sleep", "infinity"}}},
		}, {
			"name":                  tenantName,
			"vni":                   101,
			"trustDomain":           "conformance.example",
			"outboundTrafficPolicy": "Deny",
			"podCidrs":              []string{"10.1.0.0/16", "fd00:1::/64"},
			"serviceCidrs":          []string{"10.101.0.0/16", "fd00:101::/64"},
			"gatewayCidrs":          []string{"10.102.0.0/20", "fd00:102::/64"},
			"config":                []string{"services.yaml"},
			"nodes":                 []object{{"name": "node-1", "az": "az1"}, {"name": "node-2", "az": "az1"}},
			"pods":                  t.pods,
		}},
	})
	if err != nil {
		return "", err
	}
	file := filepath.Join(t.folder, "world.yaml")
	return file, os.WriteFile(file, text, 0o644)
}

// readObjects returns the objects of one of the suite's manifests.
func readObjects(manifest string) ([]*unstructured.Unstructured, error) {
	text, err := fs.ReadFile(conformance.Manifests, manifest)
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	// So many bytes are looked at to tell YAML from JSON.
	decoder := yamlutil.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); err == io.EOF {
			return objects, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", manifest, err)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
}
